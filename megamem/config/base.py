"""The base of all configuration classes: frozen dataclasses whose annotations say which values are allowed.

pydantic reads the annotations when a configuration is loaded (`pretrain.config.loader`). Objects made in code are held
to the same limits by `Config`; their types are for mypy to check.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, GetCoreSchemaHandler, NonNegativeFloat, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, core_schema

from megamem.config.identity import Role


@dataclass(frozen=True)
class EffectiveWhen:
    """Marks a field that has an effect only where `condition(owner)` holds; elsewhere the loader refuses it.

    Args:
        condition: takes the config object that owns the field.
        reason: the condition in words, for the error message: "<key> has no effect unless <reason>".
    """

    condition: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True)
class Advice:
    """Ends the message about a broken limit: what the limit is for, or what to write instead."""

    words: str


Kinds: TypeAlias = Mapping["type[Config]", Mapping[str, "type[Config]"]]
"""By class with `has_kinds`, the classes that its sections may be, by `kind` and the default first."""


class Config:
    """The base of every configuration class, a frozen dataclass. A subclass's `__post_init__` calls this one first."""

    # Strict: nothing is converted but what loses nothing (2 to 2.0).
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def __post_init__(self) -> None:
        for name, spec in field_specs(type(self)).items():
            value = getattr(self, name)
            if broken := spec.broken_limit(value):
                raise ValueError(f"{type(self).__name__}.{name} is {value}: {broken}")

    has_kinds: ClassVar[bool] = False
    """True if a section of this class is one of several others, told apart by `kind`; they are subclasses, which this
    one does not know."""

    @classmethod
    def from_values(cls, values: Any, kinds: Kinds) -> Self:
        """The configuration that nested mappings, tuples and scalars describe; what they leave out has its default.

        Raises:
            ValidationError: pydantic's own error, with everything that is wrong.
        """
        return typing.cast(Self, _adapter(cls).validate_python(values, context=kinds))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        if vars(cls).get("has_kinds"):
            return core_schema.with_info_plain_validator_function(cls._of_kind)
        schema = handler(source)
        # Strict would also mean that only an object can be a section, and no mapping.
        typing.cast(core_schema.DataclassSchema, handler.resolve_ref_schema(schema))["strict"] = False
        return schema

    @classmethod
    def _of_kind(cls, value: Any, info: core_schema.ValidationInfo) -> Config:
        """The section that a mapping describes, by its kind."""
        assert info.context is not None
        classes = info.context[cls]
        kind = value.get(KIND) if isinstance(value, dict) and KIND in value else next(iter(classes))
        if not isinstance(kind, str) or kind not in classes:
            unknown = InitErrorDetails(
                type="literal_error", loc=(KIND,), input=kind, ctx={"expected": " or ".join(classes)}
            )
            raise ValidationError.from_exception_data(cls.__name__, [unknown])
        section: Config = classes[kind].from_values(value, info.context)
        return section


LossWeight = Annotated[NonNegativeFloat, Advice("0 turns it off"), Role.RUNNING]

KIND = "kind"
"""The key that says of which class a section is."""


# To mypy, classes that are given to a cached function are not hashable: hence Any, here and below.
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


@dataclass(frozen=True)
class FieldSpec:
    """One field of a configuration class."""

    owner: type[Config]
    """The class."""
    kind: Any
    """The type without `Annotated` and `| None`: a `Config`, a `Literal`, `tuple[X, ...]` or a scalar type."""
    optional: bool
    """True if null is a value."""
    marks: tuple[Any, ...]
    """Metadata of `Annotated`: limits, `EffectiveWhen`, `Advice`, `Role`."""
    field: dataclasses.Field[Any]

    @property
    def required(self) -> bool:
        return self.field.default is MISSING and self.field.default_factory is MISSING

    def default(self) -> Any:
        """A fresh default value. Only for fields that have one."""
        assert not self.required
        return self.field.default if self.field.default_factory is MISSING else self.field.default_factory()

    @property
    def effective(self) -> EffectiveWhen | None:
        """Condition under which the field is read, all of its marks together; None: always."""
        marks = [mark for mark in self.marks if isinstance(mark, EffectiveWhen)]
        if len(marks) < 2:
            return marks[0] if marks else None
        return EffectiveWhen(
            lambda owner: all(mark.condition(owner) for mark in marks), " and ".join(mark.reason for mark in marks)
        )

    @property
    def role(self) -> Role | None:
        """Role of the field: part of the model's identity or not; None: as its section says."""
        return next((mark for mark in self.marks if isinstance(mark, Role)), None)

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def element(self) -> FieldSpec:
        """Specification of a list's elements."""
        return _spec(self.owner, typing.get_args(self.kind)[0], self.field)

    @property
    def section(self) -> type[Config] | None:
        """The class of a nested section, or of the sections of a list."""
        kind = self.element.kind if self.is_list else self.kind
        return kind if isinstance(kind, type) and issubclass(kind, Config) else None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a choice; of anything else none."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    def broken_limit(self, value: Any) -> str | None:
        """Reason why a value is outside of the field's limits, in words; None if it is within."""
        if value is None:
            return None
        if self.is_list:
            return next(filter(None, map(self.element.broken_limit, value)), None)
        advice = "".join(f"; {mark.words}" for mark in self.marks if isinstance(mark, Advice))
        for mark in self.marks:
            match mark:
                case Gt(bound) if not value > bound:
                    # PositiveInt, a whole number.
                    return f"it must be {'at least 1' if self.kind is int and bound == 0 else f'above {bound}'}{advice}"
                case Ge(bound) if not value >= bound:
                    return f"it must {'not be negative' if bound == 0 else f'be at least {bound}'}{advice}"
                case Lt(bound) if not value < bound:
                    return f"it must be below {bound}{advice}"
                case Le(bound) if not value <= bound:
                    return f"it must be at most {bound}{advice}"
        return None


def field_specs(cls: type[Config]) -> Mapping[str, FieldSpec]:
    """The fields of a configuration class by name."""
    return _field_specs(typing.cast(Any, cls))


@functools.cache
def _field_specs(cls: Any) -> Mapping[str, FieldSpec]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {item.name: _spec(cls, hints[item.name], item) for item in dataclasses.fields(cls)}


def _spec(cls: type[Config], hint: Any, item: dataclasses.Field[Any]) -> FieldSpec:
    optional = False
    marks: list[Any] = []
    while True:
        if typing.get_origin(hint) is Annotated:
            hint, *more = typing.get_args(hint)
            marks += more
        elif typing.get_origin(hint) in (types.UnionType, typing.Union):
            optional = True
            (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
        else:
            return FieldSpec(cls, hint, optional, tuple(marks), item)
