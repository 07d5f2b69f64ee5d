"""A tree of located values to nested frozen dataclasses, strictly: no unknown key, no conversion that loses anything."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from pretrain.config.compose import BASE_KEY
from pretrain.config.fields import FieldSpec, all_keys, expected, field_specs
from pretrain.config.source import Node, kind_of
from pretrain.config.suggest import did_you_mean, nearest_keys
from pretrain.errors import ConfigError

T = typing.TypeVar("T")


class _Unusable:
    """Stands for a value that was refused, so that the rest can still be checked."""


_UNUSABLE = _Unusable()

# Sections of former versions, which their files and checkpoints still hold, and what to do with one that says something.
_FORMER = {"train.kernel_overrides": "remove it: train.kernels chooses the implementation of all memory kernels"}


def build(cls: type[T], node: Node) -> T:
    """The configuration object that a tree describes; what the tree leaves out has its default.

    Raises:
        ConfigError: naming every problem that was found.
    """
    builder = _Builder(cls)
    config = builder.section(cls, node, "", default=None)
    if builder.problems:
        raise ConfigError(join_problems(builder.problems))
    return typing.cast(T, config)


def join_problems(problems: list[str]) -> str:
    """One message out of many."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems)


@dataclass
class _Builder:
    """One pass over a tree, collecting problems."""

    root: type
    problems: list[str] = field(default_factory=list)

    def section(self, cls: Any, node: Node, prefix: str, default: Any) -> Any:
        """An instance of `cls`; fields that `node` leaves out come from `default`, or from the class where that is None."""
        if not isinstance(node.value, dict):
            where = prefix.removesuffix(".") or "the configuration"
            return self._refuse(node, f"{where} is {kind_of(node)}, expected a mapping of keys")
        specs = field_specs(cls)
        usable = True
        for name in node.value:
            if name not in specs and not (f"{prefix}{name}" in _FORMER and _is_null(node.value[name])):
                usable = False
                origin = node.key_origins.get(name, node.origin)
                self.problems.append(f"{origin}: {self._unknown(f'{prefix}{name}', prefix, list(specs))}")
        values = {}
        for name, spec in specs.items():
            key = f"{prefix}{name}"
            if name in node.value:
                inherited = None if spec.required else spec.default() if default is None else getattr(default, name)
                values[name] = self._value(spec, node.value[name], key, inherited)
            elif spec.required and default is None:
                values[name] = self._refuse(node, f"{key} is missing: it has no default")
        if not usable or any(value is _UNUSABLE for value in values.values()):
            return _UNUSABLE
        try:
            return cls(**values) if default is None else dataclasses.replace(default, **values)
        except ValueError as error:
            return self._refuse(node, f"{error}{_places(str(error), node)}")

    def _value(self, spec: FieldSpec, node: Node, key: str, default: Any) -> Any:
        if node.value is None and spec.optional:
            return None
        if spec.section is not None:
            # A mapping over null, or over a section of another class, starts from that class's defaults.
            base = default if isinstance(default, spec.section) else None
            return self.section(spec.section, node, f"{key}.", base)
        return self._plain(spec.kind, spec.optional, node, key)

    def _plain(self, kind: Any, optional: bool, node: Node, key: str) -> Any:
        """A scalar, a choice or a list."""
        if typing.get_origin(kind) is tuple:
            return self._list(kind, optional, node, key)
        if dataclasses.is_dataclass(kind):
            return self.section(kind, node, f"{key}.", default=None)
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
            if not isinstance(node.value, dict | list):
                for choice in choices:
                    if type(choice) is type(node.value) and choice == node.value:
                        return choice
            hint = did_you_mean(node.value, choices) if isinstance(node.value, str) else ""
            return self._refuse(node, f"{key} is {kind_of(node)}, expected {expected(kind, optional)}{hint}")
        return self._scalar(kind, optional, node, key)

    def _list(self, kind: Any, optional: bool, node: Node, key: str) -> Any:
        if not isinstance(node.value, list):
            return self._refuse(node, f"{key} is {kind_of(node)}, expected {expected(kind, optional)}")
        element = typing.get_args(kind)[0]
        items = [self._plain(element, False, child, f"{key}.{index}") for index, child in enumerate(node.value)]
        return _UNUSABLE if any(item is _UNUSABLE for item in items) else tuple(items)

    def _scalar(self, kind: type, optional: bool, node: Node, key: str) -> Any:
        value = node.value
        wrong = f"{key} is {kind_of(node)}, expected {expected(kind, optional)}"
        if kind is float and type(value) in (int, float):
            return self._float(typing.cast("int | float", value), node, key)
        if kind is int and isinstance(value, float):
            # 1e6 is how people write a million; 2.5 steps are a mistake.
            return int(value) if value.is_integer() else self._refuse(node, wrong)
        if type(value) is kind:
            return value
        if kind is str and value is not None and not isinstance(value, dict | list):
            wrong += ": put it in quotes"
        return self._refuse(node, wrong)

    def _float(self, value: int | float, node: Node, key: str) -> Any:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            return self._refuse(node, f"{key} is {str(value)[:40]}, expected a finite number")
        if number != value:
            return self._refuse(node, f"{key} is {value}, which a 64-bit float cannot hold exactly")
        return number

    def _refuse(self, node: Node, problem: str) -> _Unusable:
        self.problems.append(f"{node.origin}: {problem}")
        return _UNUSABLE

    def _unknown(self, key: str, prefix: str, siblings: list[str]) -> str:
        if key == BASE_KEY:
            return "base names the file below this one: it can only stand at the top of a configuration file"
        if key in _FORMER:
            return f"{key} is no longer read: {_FORMER[key]}"
        valid = list(all_keys(self.root))
        name = key.removeprefix(prefix)
        if "." in name and key in valid:
            return f"unknown key {key!r}: in a file, write {name.partition('.')[0]} as a section and nest the rest"
        close = nearest_keys(key, valid)
        if close:
            return f"unknown key {key}: did you mean {' or '.join(close)}?"
        section = prefix.removesuffix(".") or "the configuration"
        return f"unknown key {key}: {section} has {', '.join(siblings)}"


def _is_null(node: Node) -> bool:
    return node.value is None or (isinstance(node.value, dict) and all(map(_is_null, node.value.values())))


def _places(message: str, node: Node) -> str:
    """Where the keys that a message mentions were set, as far as they were."""
    assert isinstance(node.value, dict)
    places = []
    for name, child in node.value.items():
        if re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", message) and child.origin != node.origin:
            places.append(f"{name}: {child.origin}")
    return f" ({', '.join(places)})" if places else ""
