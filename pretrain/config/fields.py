"""What a configuration class declares: the name, type, default and condition of every key."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal

from megamem.config import EffectiveWhen
from megamem.identity import Role

ELEMENT = "N"
"""Stands for the number of a list element in a key that is not about one of them: `data.datasets.N.path`."""

_SCALAR_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class FieldSpec:
    """One field of a configuration class."""

    name: str
    kind: Any
    """The type without `Annotated` and `| None`: a dataclass, a `Literal`, `tuple[X, ...]` or a scalar type."""
    optional: bool
    """Whether null is a value."""
    effective: EffectiveWhen | None
    """When the field is read, if not always."""
    role: Role | None
    """Whether the field is a part of the model's identity; None: as the section says that it stands in."""
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


def field_specs(cls: type) -> dict[str, FieldSpec]:
    """The fields of a configuration class by name.

    Raises:
        TypeError: the class uses a type that the loader has no rule for (a defect of ours).
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    return {item.name: _spec(cls, item, hints[item.name]) for item in dataclasses.fields(cls)}


def _spec(cls: type, item: dataclasses.Field[Any], hint: Any) -> FieldSpec:
    effective, role = None, None
    if typing.get_origin(hint) is Annotated:
        hint, *marks = typing.get_args(hint)
        effective = next((mark for mark in marks if isinstance(mark, EffectiveWhen)), None)
        role = next((mark for mark in marks if isinstance(mark, Role)), None)
    optional = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        optional = len(members) < len(typing.get_args(hint))
        hint = members[0] if len(members) == 1 else hint
    if not _is_supported(hint):
        raise TypeError(f"{cls.__name__}.{item.name}: the loader has no rule for the type {hint}")
    return FieldSpec(item.name, hint, optional, effective, role, item)


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


def role_of(key: str, config: Any) -> Role | None:
    """The role of a dotted key of a configuration object: that of the nearest marked field on the way to it."""
    role = None
    for name in key.split("."):
        # A section that is null, or the element of a list: what stands above it decides.
        if not dataclasses.is_dataclass(config) or isinstance(config, type):
            break
        spec = field_specs(type(config)).get(name)
        if spec is None:
            break
        role, config = spec.role or role, getattr(config, name)
    return role


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration class, sections included, in the order of declaration."""
    for name, spec in field_specs(cls).items():
        key = f"{prefix}{name}"
        yield key
        if spec.section is not None:
            yield from all_keys(spec.section, f"{key}.")
        elif dataclasses.is_dataclass(spec.element):
            yield from all_keys(typing.cast(type, spec.element), f"{key}.{ELEMENT}.")
