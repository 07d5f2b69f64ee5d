"""What a configuration class declares: the name, type, default and condition of every key."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal

from megamem.config_marks import EffectiveWhen
from megamem.families.registry import FAMILIES
from megamem.memory_config import MemoryConfig

ELEMENT = "N"
"""Stands for the number of a list element in a key that is not about one of them: `data.datasets.N.path`."""

_SCALAR_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class FieldSpec:
    """One field of a configuration class."""

    name: str
    kind: Any
    """The type without `Annotated` and `| None`: a dataclass, the base of a tagged union (`variants`), a `Literal`, `tuple[X, ...]` or a scalar type."""
    optional: bool
    """Whether null is a value."""
    effective: EffectiveWhen | None
    """When the field is read, if not always."""
    field: dataclasses.Field[Any]

    @property
    def required(self) -> bool:
        return self.field.default is MISSING and self.field.default_factory is MISSING

    def default(self) -> Any:
        """A fresh default value. Only for fields that have one."""
        assert not self.required
        return self.field.default if self.field.default_factory is MISSING else self.field.default_factory()

    @property
    def section(self) -> type | None:
        """The configuration class of a nested section, if this is one."""
        return self.kind if isinstance(self.kind, type) and dataclasses.is_dataclass(self.kind) else None

    @property
    def element(self) -> Any:
        """The type of the elements of a list, None for anything else."""
        return typing.get_args(self.kind)[0] if typing.get_origin(self.kind) is tuple else None


TAG = "kind"
"""The key that says which variant of a tagged union a section is; without it, it is the first."""


def variants(section: type) -> dict[str, type]:
    """The classes that a section may be, by the value of its tag; empty where its class is settled."""
    return {kind: family.config for kind, family in FAMILIES.items()} if section is MemoryConfig else {}


def only_for(section: type, name: str) -> str | None:
    """Which variants of a section have this key, in the words of a condition; None where all have it, or none."""
    of = variants(section)
    kinds = [kind for kind, cls in of.items() if name in field_specs(cls)]
    if not kinds or len(kinds) == len(of):
        return None
    words = ", ".join(kinds[:-1]) + " or " + kinds[-1] if len(kinds) > 1 else kinds[0]
    return f"{TAG} is {words}"


def union_specs(section: type) -> dict[str, tuple[type, FieldSpec]]:
    """The fields of all classes that a section may be, each with the first class that has it."""
    found: dict[str, tuple[type, FieldSpec]] = {}
    for cls in variants(section).values() or (section,):
        for name, spec in field_specs(cls).items():
            found.setdefault(name, (cls, spec))
    return found


def field_specs(cls: type) -> dict[str, FieldSpec]:
    """The fields of a configuration class by name.

    Raises:
        TypeError: the class uses a type that the loader has no rule for (a defect of ours).
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    return {item.name: _spec(cls, item, hints[item.name]) for item in dataclasses.fields(cls)}


def _spec(cls: type, item: dataclasses.Field[Any], hint: Any) -> FieldSpec:
    effective = None
    if typing.get_origin(hint) is Annotated:
        hint, *marks = typing.get_args(hint)
        effective = next((mark for mark in marks if isinstance(mark, EffectiveWhen)), None)
    optional = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        optional = len(members) < len(typing.get_args(hint))
        hint = members[0] if len(members) == 1 else hint
    if not _is_supported(hint):
        raise TypeError(f"{cls.__name__}.{item.name}: the loader has no rule for the type {hint}")
    return FieldSpec(item.name, hint, optional, effective, item)


def _is_supported(kind: Any) -> bool:
    if kind in _SCALAR_NAMES or dataclasses.is_dataclass(kind) or typing.get_origin(kind) is Literal:
        return True
    arguments = typing.get_args(kind)
    is_list = typing.get_origin(kind) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis
    return is_list and _is_supported(arguments[0])


def expected(kind: Any, optional: bool) -> str:
    """A type in the words of an error message."""
    if typing.get_origin(kind) is Literal:
        words = "one of " + ", ".join(str(choice) for choice in typing.get_args(kind))
    elif typing.get_origin(kind) is tuple:
        words = "a list"
    else:
        words = _SCALAR_NAMES.get(kind, "a mapping of keys")
    return f"{words}, or null" if optional else words


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration class, sections included, in the order of declaration."""
    for name, (_, spec) in union_specs(cls).items():
        key = f"{prefix}{name}"
        yield key
        if spec.section is not None:
            yield from all_keys(spec.section, f"{key}.")
        elif dataclasses.is_dataclass(spec.element):
            yield from all_keys(typing.cast(type, spec.element), f"{key}.{ELEMENT}.")
