"""YAML files, overrides and stored mappings to a configuration, and back.

pydantic checks the values; its findings get places and our words.

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
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megamem.config.base import KIND, Config, FieldSpec, field_specs
from pretrain.config.bases import BASE_KEY, read_with_bases
from pretrain.config.keys import (
    KINDS,
    Ineffective,
    all_keys,
    fields_of,
    ineffective_fields,
    nearest_keys,
    only_for,
    variants_of,
)
from pretrain.config.schema import RunConfig
from pretrain.config.source import (
    SIZE_KEY,
    Layer,
    Node,
    apply_overrides,
    dump_inline,
    dump_yaml,
    find,
    from_plain,
    kind_of,
    node_at,
    to_plain,
    without,
)
from pretrain.config.suggest import did_you_mean
from pretrain.errors import ConfigError
from pretrain.printable import printable

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


def load_as(cls: type[T], path: str | Path) -> T:
    """The configuration of any class that a YAML file describes; it may name others under `base`.

    Raises:
        ConfigError: the file has problems; the message names key, value, file and line, and the fix, of every one
            found.
    """
    return settle(cls, read_with_bases(Path(path)))[0]


def from_dict(
    mapping: Mapping[str, Any], source: str = "the stored configuration", overrides: Sequence[str] = ()
) -> RunConfig:
    """The configuration that `to_dict` stored, with overrides laid over it.

    Options without effect stay: no user is present to mend them.
    """
    node = apply_overrides(without_former(from_plain(mapping, source, Layer.BASE), of_value=True), overrides)
    return build(RunConfig, _without(node, _foreign_keys(RunConfig, node)))


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


def config_changes(before: RunConfig, now: RunConfig) -> dict[str, str]:
    """Differences between two configurations: "key: before -> now" by key."""
    old, new = flat(to_dict(before)), flat(to_dict(now))
    return {
        key: f"{key}: {shown_at(key, old)} -> {shown_at(key, new)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def shown_at(key: str, leaves: Mapping[str, Any]) -> str:
    """The value of a key among those of `flat`, as a configuration has it."""
    return dump_inline(leaves[key]) if key in leaves else "not set"


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by path, as in `train.num_steps`."""
    if isinstance(value, dict):
        return {key: leaf for name, part in value.items() for key, leaf in flat(part, f"{prefix}{name}.").items()}
    return {prefix.removesuffix("."): value}


class _OptionWithoutEffectError(ConfigError):
    """Values that nothing reads; carries their keys."""

    def __init__(self, problems: list[str], keys: set[str]) -> None:
        super().__init__(join_problems(problems))
        self.keys = keys


def settle(cls: type[T], node: Node, in_file: Node | None = None) -> tuple[T, dict[str, str]]:
    """Build the configuration and drop inherited values that have no effect.

    Args:
        node: all of the configuration's values.
        in_file: the values of its file, if overrides were laid over them.

    Returns:
        The configuration, and for each dropped key the condition that it lacks, in words.

    Raises:
        ConfigError: the tree does not fit the class, or a value without effect was asked for.
    """
    dropped: dict[str, str] = {}
    while True:
        foreign = _foreign_keys(cls, node)
        config = build(cls, _without(node, foreign))
        silent = [*foreign, *ineffective_fields(config)]
        set_here = [(item, find(node, item.key.split("."))) for item in silent]
        refused = {item.key: (item, at) for item, at in set_here if at is not None and at.last_layer >= Layer.FILE}
        if in_file is not None and any(at.last_layer == Layer.FILE for _, at in refused.values()):
            # Overrides took its effect away, unless it had none in the file alone.
            dead = _refused_keys(cls, in_file)
            refused = {
                key: (item, at) for key, (item, at) in refused.items() if at.last_layer > Layer.FILE or key in dead
            }
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


def _foreign_keys(cls: type[Config], node: Node, prefix: str = "") -> list[Ineffective]:
    """Every key that is set in a section of one kind and that only sections of other kinds have."""
    if not isinstance(node.value, dict):
        return []
    chosen, found = _variant_at(cls, node), []
    for name in node.value:
        if name not in field_specs(chosen) and (reason := only_for(cls, name)):
            found.append(Ineffective(f"{prefix}{name}", reason, at_default=False))
    for name, spec in field_specs(chosen).items():
        if spec.section is not None and not spec.is_list and name in node.value:
            found += _foreign_keys(spec.section, node.value[name], f"{prefix}{name}.")
    return found


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
        settle(cls, in_file)
    except _OptionWithoutEffectError as error:
        return error.keys
    except ConfigError:
        return set()
    return set()


def build(cls: type[T], node: Node) -> T:
    """The configuration object that a tree describes; keys that the tree leaves out have their defaults.

    Raises:
        ConfigError: the tree has problems; the message names every one that was found.
    """
    node = without_former(node, of_value=False)
    try:
        return cls.from_values(_plain(node), {section: variants() for section, variants in KINDS.items()})
    except ValidationError as error:
        raise ConfigError(join_problems([_problem(cls, node, each) for each in error.errors()])) from error


def without_former(node: Node, *, of_value: bool) -> Node:
    """The tree without the sections of former versions that have no values.

    Args:
        node: tree of a whole configuration.
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
        if key == "model.second_memory":
            # Families name the section that most models have alone.
            refusal = refusal.replace("model.memory.", f"{key}.")
        return f"{node.origin}: {refusal}{_places(refusal, node)}"
    spec = _spec_at(root, tree, loc)
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
    *path, name = map(printable, loc)
    key, section = printable(_key(loc)), ".".join(path) or "the configuration"
    if key == BASE_KEY:
        return "base names the file below this one: it can only stand at the top of a configuration file"
    if key == SIZE_KEY:
        return (
            f"{key} fills keys where a configuration file is read, and this run is stored with its own: change those, "
            "as in model.num_layers"
        )
    if key in _FORMER:
        return f"{key} is no longer read: {_FORMER[key]}"
    valid = [*all_keys(root), *([SIZE_KEY] if root is RunConfig else [])]
    if "." in name and key in valid:
        return f"unknown key {key!r}: in a file, write {name.partition('.')[0]} as a section and nest the rest"
    close = nearest_keys(key, valid)
    if close:
        return f"unknown key {key}: did you mean {' or '.join(close)}?"
    spec = _spec_at(root, tree, loc[:-1])
    cls = root if spec is None or spec.section is None else spec.section
    return f"unknown key {key}: {section} has {', '.join(fields_of(_variant_at(cls, node_at(tree, loc[:-1]))))}"


def _spec_at(root: type[Config], tree: Node, loc: tuple[str | int, ...]) -> FieldSpec | None:
    """Specification of the value at a place in a tree; None for the whole tree."""
    spec, section = None, root
    for depth, step in enumerate(loc):
        if isinstance(step, int):
            assert spec is not None
            spec = spec.element
        else:
            spec = fields_of(_variant_at(section, node_at(tree, loc[:depth])))[step]
        section = spec.section or section
    return spec


def _variant_at(section: type[Config], node: Node) -> type[Config]:
    """The variant of a section; the class itself where it has no variants, or none of the named kind."""
    variants = variants_of(section)
    kind = node.value.get(KIND) if isinstance(node.value, dict) else None
    return variants.get(str(kind.value) if kind is not None else next(iter(variants), ""), section)


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
