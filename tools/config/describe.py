"""The help of every configuration key, taken from the source of the configuration classes."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from dataclasses import MISSING, dataclass
from typing import Any

from megamem.config.base import KIND, Config, FieldSpec
from pretrain.config.keys import ELEMENT, RUN_RULES, fields_of, only_for, variants_of
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
    """True if the key only holds other keys."""


def describe_fields(cls: type[Config]) -> list[FieldDoc]:
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


def _describe(section: type[Config], prefix: str) -> list[FieldDoc]:
    described = []
    for name, spec in fields_of(section).items():
        key = f"{prefix}{name}"
        default = MISSING if spec.required else spec.default()
        reasons = (only_for(section, name), spec.effective.reason if spec.effective is not None else None)
        # A kind is explained by its class.
        owners = (section, *variants_of(section).values()) if name == KIND else (spec.owner,)
        doc = " ".join(filter(None, (_docstring(owner, name) for owner in owners)))
        described.append(
            FieldDoc(
                key,
                _type_name(spec),
                default,
                doc,
                " and ".join(filter(None, reasons)) or None,
                spec.section is not None,
            )
        )
        if spec.section is not None:
            described += _describe(spec.section, f"{key}.{ELEMENT}." if spec.is_list else f"{key}.")
    return described


def _type_name(spec: FieldSpec) -> str:
    if spec.is_list:
        name = "list"
    elif spec.section is not None:
        name = "section"
    else:
        name = " | ".join(map(str, spec.choices)) or spec.kind.__name__
    return f"{name} | null" if spec.optional else name


def _docstring(cls: type[Config], name: str) -> str:
    """The help of a field: that of the class, or of the nearest above it that has one."""
    owners = (owner for owner in cls.__mro__ if dataclasses.is_dataclass(owner))
    return next((docs[name] for owner in owners if name in (docs := field_docstrings(owner))), "")


@functools.cache
def field_docstrings(cls: Any) -> dict[str, str]:
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
