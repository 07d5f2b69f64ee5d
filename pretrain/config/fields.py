"""Every key that a configuration class and the sections in it have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from megamem.config_base import KIND, Config, FieldSpec, field_specs
from megamem.identity import Role
from pretrain.config.source import Node, node_at

ELEMENT = "N"
"""Stands for the number of a list element in a key that is not about one of them: `data.datasets.N.path`."""


def fields_of(section: type[Config]) -> Mapping[str, FieldSpec]:
    """The fields that a section may have; with variants, those of all, each as in the first variant that has it."""
    variants = section.variants()
    if not variants:
        return field_specs(section)
    found: dict[str, FieldSpec] = {}
    for cls in variants.values():
        for name, spec in field_specs(cls).items():
            found.setdefault(name, spec)
    return {**found, KIND: replace(found[KIND], owner=section, kind=Literal[tuple(variants)])}


def variant_at(section: type[Config], node: Node) -> type[Config]:
    """The variant of a section; the class itself where it has no variants, or none of the named kind."""
    variants = section.variants()
    kind = node.value.get(KIND) if isinstance(node.value, dict) else None
    return variants.get(str(kind.value) if kind is not None else next(iter(variants), ""), section)


def only_for(section: type[Config], name: str) -> str | None:
    """The variants of a section that have this key, in the words of a condition; None where all or none have it."""
    variants = section.variants()
    kinds = [kind for kind, cls in variants.items() if name in field_specs(cls)]
    if not kinds or len(kinds) == len(variants):
        return None
    return f"{KIND} is {', '.join(kinds[:-1]) + ' or ' if kinds[1:] else ''}{kinds[-1]}"


def role_of(key: str, config: Config) -> Role | None:
    """The role of a dotted key of a configuration: that of the nearest marked field on the way to it."""
    role, section = None, config
    for name in key.split("."):
        # A section that is null, or the element of a list: the key above it decides.
        if not isinstance(section, Config) or name not in field_specs(type(section)):
            break
        role, section = field_specs(type(section))[name].role or role, getattr(section, name)
    return role


def spec_at(root: type[Config], tree: Node, loc: tuple[str | int, ...]) -> FieldSpec | None:
    """Specification of the value at a place in a tree; None for the whole tree."""
    spec, section = None, root
    for depth, step in enumerate(loc):
        if isinstance(step, int):
            assert spec is not None
            spec = spec.element
        else:
            spec = fields_of(variant_at(section, node_at(tree, loc[:depth])))[step]
        section = spec.section or section
    return spec


def all_keys(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration class, sections included, in the order of declaration."""
    for name, spec in fields_of(cls).items():
        key = f"{prefix}{name}"
        yield key
        if spec.section is not None:
            yield from all_keys(spec.section, f"{key}.{ELEMENT}." if spec.is_list else f"{key}.")
