"""The help of every configuration key, taken from the source of the configuration classes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from pretrain.config.effective import RUN_RULES
from pretrain.config.fields import ELEMENT, TAG, FieldSpec, only_for, union_specs, variants
from pretrain.config.schema import RunConfig


@dataclass(frozen=True)
class FieldDoc:
    """The help of one key."""

    key: str
    type: str
    default: Any
    """The default value; `dataclasses.MISSING` where the key is required."""
    doc: str
    effective_when: str | None
    """The condition under which the key is read, in words; None: always."""
    is_section: bool = False
    """Whether the key only holds other keys."""


def describe_fields(cls: type) -> list[FieldDoc]:
    """The help of every key of a configuration class, depth first, in the order of declaration.

    The help text is the docstring under the field.
    """
    described = _describe(cls, "")
    if cls is not RunConfig:
        return described
    reasons = {rule.key: rule.reason for rule in RUN_RULES}
    return [
        dataclasses.replace(
            doc, effective_when=" and ".join(filter(None, (doc.effective_when, reasons.get(doc.key)))) or None
        )
        for doc in described
    ]


def _describe(cls: type, prefix: str) -> list[FieldDoc]:
    described = []
    for name, (owner, spec) in union_specs(cls).items():
        key = f"{prefix}{name}"
        nested = spec.section or (spec.element if dataclasses.is_dataclass(spec.element) else None)
        default = MISSING if spec.required else spec.default()
        reasons = (only_for(cls, name), spec.effective.reason if spec.effective is not None else None)
        reason = " and ".join(filter(None, reasons)) or None
        kind, doc = _type_name(spec), _docstring(owner, name)
        if name == TAG and (of := variants(cls)):
            kind = " | ".join(of)
            doc = " ".join((_docstring(cls, name), *(_docstring(variant, name) for variant in of.values())))
        described.append(FieldDoc(key, kind, default, doc, reason, nested is not None))
        if nested is not None:
            element = f"{ELEMENT}." if spec.section is None else ""
            described += _describe(typing.cast(type, nested), f"{key}.{element}")
    return described


def _type_name(spec: FieldSpec) -> str:
    if spec.section is not None:
        name = "section"
    elif spec.element is not None:
        name = "list"
    elif typing.get_origin(spec.kind) is Literal:
        name = " | ".join(str(choice) for choice in typing.get_args(spec.kind))
    else:
        name = spec.kind.__name__
    return f"{name} | null" if spec.optional else name


def _docstring(cls: type, name: str) -> str:
    """The help of a field: that of the class, or of the nearest above it that has one."""
    owners = (owner for owner in cls.__mro__ if dataclasses.is_dataclass(owner))
    return next((docs[name] for owner in owners if name in (docs := field_docstrings(owner))), "")


def field_docstrings(cls: type) -> dict[str, str]:
    """The string under each field that a class declares itself, by field name."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return docs
