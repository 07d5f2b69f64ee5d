"""Keys of a configuration class and the sections in it, and those that nothing reads, given the others.

A field states a condition about its own section itself (`EffectiveWhen`); conditions about another section stand in
`RUN_RULES`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

from megamem.config.base import KIND, Config, FieldSpec, field_specs
from megamem.config.identity import Role
from megamem.config.memory import MemoryConfig
from megamem.families.registry import FAMILIES
from pretrain.config.schema import RunConfig

ELEMENT = "N"
"""Stands for the number of a list element in a key that is not about one of them: `data.datasets.N.path`."""
_LEAST_SIMILARITY = 0.6
_SECTION_WEIGHT = 0.1
_MAX_SUGGESTIONS = 3


KINDS: dict[type[Config], Callable[[], Mapping[str, type[Config]]]] = {
    MemoryConfig: lambda: {kind: family.config for kind, family in FAMILIES.items()}
}
"""By class with `has_kinds`, the variants of its sections by `kind`, the default first."""


def variants_of(section: type[Config]) -> Mapping[str, type[Config]]:
    """The classes that a section may be, by `kind`; none where it is of this one."""
    return KINDS[section]() if section in KINDS else {}


def fields_of(section: type[Config]) -> Mapping[str, FieldSpec]:
    """The fields that a section may have; with variants, those of all, each as in the first variant that has it."""
    variants = variants_of(section)
    if not variants:
        return field_specs(section)
    found: dict[str, FieldSpec] = {}
    for cls in variants.values():
        for name, spec in field_specs(cls).items():
            found.setdefault(name, spec)
    return {**found, KIND: replace(found[KIND], owner=section, kind=Literal[tuple(variants)])}


def only_for(section: type[Config], name: str) -> str | None:
    """The variants of a section that have this key, in the words of a condition; None where all or none have it."""
    variants = variants_of(section)
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


def all_keys(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration class, sections included, in the order of declaration."""
    for name, spec in fields_of(cls).items():
        key = f"{prefix}{name}"
        yield key
        if spec.section is not None:
            yield from all_keys(spec.section, f"{key}.{ELEMENT}." if spec.is_list else f"{key}.")


def nearest_keys(unknown: str, keys: Iterable[str]) -> list[str]:
    """The valid keys most like an unknown one: by its last name wherever it stands (`lr`: `optimizer.lr`), the
    nearest section preferred.

    Args:
        unknown: the dotted key that does not exist.
        keys: every dotted key that does; `N` stands for the number of a list element.

    Returns:
        The best one, more where several are equally good, none where nothing is alike.
    """
    segments = unknown.split(".")
    pattern = ".".join(ELEMENT if segment.isdecimal() else segment for segment in segments)
    section, _, name = pattern.rpartition(".")
    keys = list(keys)
    # A user who names an existing section means a key of it, or one of exactly this name elsewhere.
    knows_section = any(key.startswith(f"{section}.") for key in keys)
    scores = {}
    for key in keys:
        key_section, _, key_name = key.rpartition(".")
        similarity = _ratio(name, key_name)
        least = 1.0 if knows_section and key_section != section else _LEAST_SIMILARITY
        if similarity >= least:
            scores[key] = similarity + _SECTION_WEIGHT * _ratio(section, key_section)
    best = max(scores.values(), default=0.0)
    numbers = [segment for segment in segments if segment.isdecimal()]
    return [_with_numbers(key, numbers) for key, score in scores.items() if score == best][:_MAX_SUGGESTIONS]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _with_numbers(key: str, numbers: list[str]) -> str:
    remaining = iter(numbers)
    return ".".join(next(remaining, "0") if segment == ELEMENT else segment for segment in key.split("."))


@dataclass(frozen=True)
class CrossRule:
    """A key that is read only under a condition on another section."""

    key: str
    condition: Callable[[RunConfig], bool]
    reason: str


def _has_memory(run: RunConfig) -> bool:
    return run.model.memory is not None


def _has_split_parameters(run: RunConfig) -> bool:
    return run.model.memory is not None or run.model.moe is not None


def _reads_placement(key: str, run: RunConfig) -> bool:
    return run.model.memory is None or key in run.model.memory.placement_keys


def _second_reads_placement(key: str, run: RunConfig) -> bool:
    second = run.model.second_memory
    return run.model.memory is None or second is None or key in second.placement_keys


def _has_pre_values(run: RunConfig) -> bool:
    return any(memory.width("pre_values") > 0 for memory in run.model.memories)


def _has_streams(run: RunConfig) -> bool:
    return run.model.residual_streams is not None


def _has_stages(run: RunConfig) -> bool:
    return run.stage is not None


_OF_MEMORY = (
    "parallel.memory_rows",
    "parallel.overlap_memory",
    "parallel.gradient_sm_share",
    "logging.memory_every_steps",
    "optimizer.value_weight_decay",
    "optimizer.value_clip_grad",
    "optimizer.tables",
    "optimizer.table_gradients",
    "optimizer.tables_every",
    "optimizer.table_gradient_dtype",
    "optimizer.table_folder",
    "optimizer.value_offload",
    "optimizer.value_lr",
    "optimizer.value_lr_multiplier",
    "optimizer.value_lr_end_multiplier",
    "optimizer.value_lr_decay_tokens",
    "optimizer.retrieval_lr",
    "optimizer.retrieval_weight_decay",
)
RUN_RULES: tuple[CrossRule, ...] = (
    CrossRule("parallel.memory", _has_split_parameters, "model.memory or model.moe is set"),
    *(CrossRule(key, _has_memory, "model.memory is set") for key in _OF_MEMORY),
    CrossRule("train.recompute_streams", _has_streams, "model.residual_streams is set"),
    CrossRule("optimizer.schedule_from", _has_stages, "the run has stages"),
    CrossRule(
        "optimizer.value_lr_from",
        lambda run: _has_memory(run) and _has_stages(run),
        "model.memory is set and the run has stages",
    ),
    CrossRule("optimizer.pre_value_lr_multiplier", _has_pre_values, "model.memory has pre-values"),
    *(
        CrossRule(f"model.{memory}.placement.{key}", partial(reads, key), f"model.{memory} stands {where}")
        for memory, reads in (("memory", _reads_placement), ("second_memory", _second_reads_placement))
        for key, where in (
            ("spans", "where placement says, and not in the one place of its kind"),
            ("position", "where placement says, and not in the one place of its kind"),
            ("query_group", "around the feed-forward, and reads what hidden states ask for"),
            ("norm", "in inserted blocks"),
        )
    ),
)


@dataclass(frozen=True)
class Ineffective:
    """A field that nothing reads."""

    key: str
    reason: str
    """The condition that does not hold, in words."""
    at_default: bool


def ineffective_fields(config: Any) -> list[Ineffective]:
    """Every field of a configuration that is not read, given the other fields."""
    found = {item.key: item for item in _in_section(config, "")}
    if isinstance(config, RunConfig):
        for rule in RUN_RULES:
            if not rule.condition(config) and rule.key not in found:
                section, name = rule.key.rsplit(".", 1)
                owner = attrgetter(section)(config)
                at_default = getattr(owner, name) == field_specs(type(owner))[name].default()
                found[rule.key] = Ineffective(rule.key, rule.reason, at_default)
    return list(found.values())


def _in_section(owner: Any, prefix: str) -> Iterator[Ineffective]:
    for name, spec in field_specs(type(owner)).items():
        value = getattr(owner, name)
        if spec.effective is not None and not spec.effective.condition(owner):
            at_default = not spec.required and value == spec.default()
            yield Ineffective(f"{prefix}{name}", spec.effective.reason, at_default)
        elif dataclasses.is_dataclass(value):
            yield from _in_section(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if dataclasses.is_dataclass(item):
                    yield from _in_section(item, f"{prefix}{name}.{index}.")


def without_ineffective(config: RunConfig) -> RunConfig:
    """A run with every field that nothing reads at its default: what is left where a section was taken out."""
    for item in ineffective_fields(config):
        if not item.at_default:
            config = _at_default(config, item.key.split("."))
    return config


def _at_default(owner: Any, path: Sequence[str]) -> Any:
    name, *rest = path
    value = _at_default(getattr(owner, name), rest) if rest else field_specs(type(owner))[name].default()
    return dataclasses.replace(owner, **{name: value})
