"""Keys with their help: all that there are, or those of a configuration."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from typing import Any

from megamem.config.base import Config, field_specs
from pretrain.config.keys import ineffective_fields
from pretrain.config.loader import to_dict
from pretrain.config.schema import RunConfig
from pretrain.config.sized import FOLLOWING_KEYS, SIZE_HELP
from pretrain.config.source import SIZE_KEY, dump_inline, dump_yaml
from pretrain.config.stages import StageEntry
from tools.config.describe import FieldDoc, describe_fields

_WIDTH = 100


def key_lines() -> Iterator[str]:
    """Every key with type, default and help."""
    entries = [dataclasses.replace(doc, key=f"stages.N.{doc.key}") for doc in describe_fields(StageEntry)]
    for doc in (*_with_size(describe_fields(RunConfig)), *entries):
        if doc.is_section:
            default = {None: ", default null", (): ", default []"}.get(doc.default, "")
            yield f"\n{doc.key}: {doc.type}{default}"
        else:
            default = "required" if doc.default is MISSING else f"default {dump_inline(doc.default)}"
            yield f"{doc.key}: {doc.type}, {default}"
        condition = f" Only where {doc.effective_when}." if doc.effective_when else ""
        yield from textwrap.wrap(doc.doc + condition, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _with_size(docs: list[FieldDoc]) -> Iterator[FieldDoc]:
    """Keys, and before the first that follows from it `model.size`, which a file may have and no configuration has."""
    for doc in docs:
        if doc.key == FOLLOWING_KEYS["num_layers"]:
            yield FieldDoc(SIZE_KEY, "str | null", None, SIZE_HELP, None)
        yield doc


def explained_lines(
    config: RunConfig, *, helps: bool = True, origin: Callable[[str], str] | None = None
) -> Iterator[str]:
    """The configuration as YAML with a line for each key.

    Args:
        config: configuration of a run or a stage.
        helps: put the help text above each key, and name keys without effect in comments.
        origin: says where a key was set, which stands behind its value.
    """
    docs = {doc.key: doc for doc in describe_fields(RunConfig)} if helps else {}
    silent = {item.key: item.reason for item in ineffective_fields(config) if item.at_default}
    yield from _explained_section(config, "", docs, silent, origin)


def _explained_section(
    config: Any, prefix: str, docs: dict[str, FieldDoc], silent: dict[str, str], origin: Callable[[str], str] | None
) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for item in dataclasses.fields(config):
        key, value = f"{prefix}{item.name}", getattr(config, item.name)
        place = f"  # {origin(key)}" if origin is not None else ""
        comment = f"{indent}# "
        if docs:
            if not prefix and dataclasses.is_dataclass(value):
                yield ""
            yield from textwrap.wrap(docs[key].doc, _WIDTH, initial_indent=comment, subsequent_indent=comment)
        if key in silent:
            if docs:
                yield f"{comment}{item.name}: without effect unless {silent[key]}"
        elif isinstance(value, Config):
            is_silent = all(f"{key}.{name}" in silent for name in field_specs(type(value)))
            yield f"{indent}{item.name}:{' {}' if is_silent else ''}"
            yield from _explained_section(value, f"{key}.", docs, silent, origin)
        elif isinstance(value, tuple) and value:
            plain = [to_dict(part) if dataclasses.is_dataclass(part) else part for part in value]
            yield f"{indent}{item.name}:{place}"
            yield textwrap.indent(dump_yaml(plain).rstrip(), f"{indent}  ")
        else:
            yield f"{indent}{item.name}: {dump_inline(value)}{place}"
