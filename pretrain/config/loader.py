"""YAML files, overrides and stored mappings to a `RunConfig`, and back.

**Options without effect.** A value that nothing reads, given the others, is an error where this run's file or an
override sets it, and is dropped where it was only inherited:

- set by an override: always an error;
- set by the named file: an error if the file alone already leaves it without effect. If an override took the effect
  away (`optimizer.schedule=constant` over a file that says `decay_steps`), the file counts as a base;
- set by a base: dropped to its default, so that a child can switch `schedule: constant` on without undoing every key of
  its base. A base may also prepare values for an option that its children switch on.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megamem.config_base import Config
from pretrain.config.compose import apply_overrides, read_with_bases
from pretrain.config.effective import Ineffective, foreign_keys, ineffective_fields
from pretrain.config.parse import build, join_problems, without_former
from pretrain.config.schema import RunConfig
from pretrain.config.source import Layer, Node, dump_yaml, find, from_plain, to_plain, without
from pretrain.errors import ConfigError

T = typing.TypeVar("T", bound=Config)


def load_as(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """A configuration of any class.

    Args:
        path: a YAML file; it may name others under `base`.
        overrides: `section.key=value` texts laid over it in order, the values in YAML.

    Raises:
        ConfigError: naming key, value, file and line, and the fix, of every problem found.
    """
    in_file = read_with_bases(Path(path))
    if not overrides:
        return settle(cls, in_file, asked_for_here)[0]
    dead_in_file = _refused_keys(cls, in_file)

    def asked_for(key: str, node: Node) -> bool:
        return node.last_layer == Layer.OVERRIDE or key in dead_in_file

    return settle(cls, apply_overrides(in_file, overrides), asked_for)[0]


def parse_config(mapping: Mapping[str, Any], cls: type[T], source: str = "the configuration") -> T:
    """A configuration from plain values, as strictly as from a file.

    Args:
        mapping: nested mappings, lists and scalars.
        cls: the configuration class.
        source: what to call the mapping in messages.
    """
    return settle(cls, from_plain(mapping, source, Layer.FILE), lambda key, node: True)[0]


def from_dict(
    mapping: Mapping[str, Any], source: str = "the stored configuration", overrides: Sequence[str] = ()
) -> RunConfig:
    """The configuration that `to_dict` stored, with overrides laid over it.

    Options without effect stay: no user is present to mend them.
    """
    node = apply_overrides(without_former(from_plain(mapping, source, Layer.BASE), of_value=True), overrides)
    return build(RunConfig, _without(node, foreign_keys(RunConfig, node)))


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested values; `from_dict` gives an equal configuration back.

    Options without effect that have their defaults are left out, because a file that states them would be refused.
    """
    silent = [item for item in ineffective_fields(config) if item.at_default]
    plain: dict[str, Any] = to_plain(_without(from_plain(dataclasses.asdict(config), "", Layer.FILE), silent))
    return plain


def to_yaml(config: Any) -> str:
    """`to_dict` as YAML; `load_config` reads an equal configuration from it, if it has loaded this one."""
    return dump_yaml(to_dict(config))


class _OptionWithoutEffectError(ConfigError):
    """Values that nothing reads; carries their keys."""

    def __init__(self, problems: list[str], keys: set[str]) -> None:
        super().__init__(join_problems(problems))
        self.keys = keys


def asked_for_here(key: str, node: Node) -> bool:
    """True if a named file or an override set the value; False if it is only inherited."""
    return node.last_layer >= Layer.FILE


def settle(cls: type[T], node: Node, asked_for: Callable[[str, Node], bool]) -> tuple[T, dict[str, str]]:
    """Build the configuration and drop inherited values that have no effect.

    Returns:
        The configuration, and for each dropped key the condition that it lacks, in words.

    Raises:
        ConfigError: the tree does not fit the class, or a value without effect was asked for.
    """
    dropped: dict[str, str] = {}
    while True:
        foreign = foreign_keys(cls, node)
        config = build(cls, _without(node, foreign))
        silent = [*foreign, *ineffective_fields(config)]
        set_here = [(item, find(node, item.key.split("."))) for item in silent]
        refused = {item.key: (item, at) for item, at in set_here if at is not None and asked_for(item.key, at)}
        if refused:
            raise _OptionWithoutEffectError(
                [
                    f"{_own_origin(at)}: {key} has no effect unless {item.reason}: remove it, "
                    "or make that condition true"
                    for key, (item, at) in refused.items()
                ],
                set(refused),
            )
        inherited = [item for item, at in set_here if at is not None]
        if not inherited:
            return config, dropped
        dropped |= {item.key: item.reason for item in inherited}
        # A dropped value may have been what kept another one in effect: look again.
        node = _without(node, inherited)


def _without(node: Node, items: Sequence[Ineffective]) -> Node:
    for item in items:
        node = without(node, item.key.split("."))
    return node


def _own_origin(node: Node) -> str:
    """Place at which the topmost layer set a value; for a section, inside it."""
    while (child := next((c for c in node.children() if c.last_layer == node.last_layer), None)) is not None:
        node = child
    return node.origin


def _refused_keys(cls: type[Config], in_file: Node) -> set[str]:
    """The options without effect for which the file would be refused if it stood alone.

    A file that cannot be built alone needs its overrides to mean anything, and is treated as a base.
    """
    try:
        settle(cls, in_file, asked_for_here)
    except _OptionWithoutEffectError as error:
        return error.keys
    except ConfigError:
        return set()
    return set()
