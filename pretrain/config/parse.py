"""Build a configuration from a tree of located values. pydantic checks it; its findings get places and our words."""

from __future__ import annotations

import re
import typing
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megamem.config_base import Config, FieldSpec
from pretrain.config.compose import BASE_KEY
from pretrain.config.fields import all_keys, fields_of, spec_at, variant_at
from pretrain.config.source import Node, find, kind_of, node_at, without
from pretrain.config.suggest import did_you_mean, nearest_keys
from pretrain.errors import ConfigError

T = typing.TypeVar("T", bound=Config)

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dataclass_type": "a mapping of keys",
}
_LIMITS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")

# Sections of former versions, which their files and checkpoints still hold, and the advice on one that has values.
_FORMER = {"train.kernel_overrides": "remove it: train.kernels chooses the implementation of all memory kernels"}


def build(cls: type[T], node: Node) -> T:
    """The configuration object that a tree describes; keys that the tree leaves out have their defaults.

    Raises:
        ConfigError: naming every problem that was found.
    """
    node = without_former(node, of_value=False)
    try:
        return cls.from_values(_plain(node))
    except ValidationError as error:
        raise ConfigError(join_problems([_problem(cls, node, each) for each in error.errors()])) from error


def without_former(node: Node, *, of_value: bool) -> Node:
    """The tree without the sections of former versions that have no values.

    Args:
        node: of a whole configuration.
        of_value: also leave out those that have values.
    """
    for key in _FORMER:
        segments = key.split(".")
        at = find(node, segments)
        if at is not None and (of_value or _is_null(at)):
            node = without(node, segments)
    return node


def join_problems(problems: list[str]) -> str:
    """One message out of many."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems)


def _plain(node: Node) -> Any:
    """A tree without its places."""
    if isinstance(node.value, dict):
        return {name: _plain(child) for name, child in node.value.items()}
    if isinstance(node.value, list):
        return tuple(_plain(child) for child in node.value)
    # 1e6 is how people write a million; 2.5 steps are a mistake.
    is_whole = isinstance(node.value, float) and node.value.is_integer()
    return int(typing.cast(float, node.value)) if is_whole else node.value


def _key(loc: tuple[str | int, ...]) -> str:
    return ".".join(map(str, loc))


def _problem(root: type[Config], tree: Node, error: ErrorDetails) -> str:
    """One finding of pydantic in our words: place, key, value and fault."""
    kind, loc, key = error["type"], error["loc"], _key(error["loc"])
    if kind in ("unexpected_keyword_argument", "missing"):
        section = node_at(tree, loc[:-1])
        if kind == "missing":
            return f"{section.origin}: {key} is missing: it has no default"
        return f"{section.key_origins[str(loc[-1])]}: {_unknown(root, tree, loc)}"
    node = node_at(tree, loc)
    if kind == "value_error":
        refusal = str(error["ctx"]["error"])
        return f"{node.origin}: {refusal}{_places(refusal, node)}"
    spec = spec_at(root, tree, loc)
    if kind == "finite_number" or (kind == "float_type" and type(node.value) is int):
        problem = f"{str(node.value)[:40]}, expected a finite number"
    elif spec is not None and (broken := kind in _LIMITS and spec.broken_limit(node.value)):
        problem = f"{node.value}: {broken}"
    else:
        # Anything else that pydantic can find comes of a type that no configuration class has yet.
        problem = f"{kind_of(node)}, expected {_expected(kind, node, spec)}"
    return f"{node.origin}: {key or 'the configuration'} is {problem}"


def _expected(kind: str, node: Node, spec: FieldSpec | None) -> str:
    """Expected kind of a value, in the words of an error message."""
    choices = spec.choices if spec is not None else ()
    words = f"one of {', '.join(map(str, choices))}" if choices else _EXPECTED[kind]
    words += ", or null" if spec is not None and spec.optional else ""
    if choices:
        return words + (did_you_mean(node.value, choices) if isinstance(node.value, str) else "")
    is_scalar = node.value is not None and not isinstance(node.value, dict | list)
    return f"{words}: put it in quotes" if kind == "string_type" and is_scalar else words


def _unknown(root: type[Config], tree: Node, loc: tuple[str | int, ...]) -> str:
    *path, name = map(str, loc)
    key, section = _key(loc), ".".join(path) or "the configuration"
    if key == BASE_KEY:
        return "base names the file below this one: it can only stand at the top of a configuration file"
    if key in _FORMER:
        return f"{key} is no longer read: {_FORMER[key]}"
    valid = list(all_keys(root))
    if "." in name and key in valid:
        return f"unknown key {key!r}: in a file, write {name.partition('.')[0]} as a section and nest the rest"
    close = nearest_keys(key, valid)
    if close:
        return f"unknown key {key}: did you mean {' or '.join(close)}?"
    spec = spec_at(root, tree, loc[:-1])
    cls = root if spec is None or spec.section is None else spec.section
    return f"unknown key {key}: {section} has {', '.join(fields_of(variant_at(cls, node_at(tree, loc[:-1]))))}"


def _is_null(node: Node) -> bool:
    return node.value is None or (isinstance(node.value, dict) and all(map(_is_null, node.value.values())))


def _places(message: str, node: Node) -> str:
    """Places at which the keys in a message were set; empty if none was."""
    assert isinstance(node.value, dict)
    places = []
    for name, child in node.value.items():
        if re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", message) and child.origin != node.origin:
            places.append(f"{name}: {child.origin}")
    return f" ({', '.join(places)})" if places else ""
