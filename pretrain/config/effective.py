"""Options without effect: fields that nothing reads, given the others.

A field states a condition about its own section itself (`EffectiveWhen`); conditions about another section stand in
`RUN_RULES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megamem.config_base import Config, field_specs
from pretrain.config.fields import only_for, variant_at
from pretrain.config.schema import RunConfig
from pretrain.config.source import Node


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


def _is_placed_around_ffn(run: RunConfig) -> bool:
    return run.model.memory is None or run.model.memory.slot is None


def _is_inserted(run: RunConfig) -> bool:
    return run.model.memory is None or run.model.memory.is_inserted


def _has_pre_values(run: RunConfig) -> bool:
    return run.model.memory is not None and run.model.memory.width("pre_values") > 0


def _has_stages(run: RunConfig) -> bool:
    return run.stage is not None


_OF_MEMORY = (
    "parallel.overlap_memory",
    "train.kernels",
    "logging.memory_every_steps",
    "optimizer.value_weight_decay",
    "optimizer.value_clip_grad",
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
    CrossRule("optimizer.schedule_from", _has_stages, "the run has stages"),
    CrossRule(
        "optimizer.value_lr_from",
        lambda run: _has_memory(run) and _has_stages(run),
        "model.memory is set and the run has stages",
    ),
    CrossRule("optimizer.pre_value_lr_multiplier", _has_pre_values, "model.memory has pre-values"),
    *(
        CrossRule(f"model.memory.placement.{key}", _is_placed_around_ffn, "model.memory stands around the feed-forward")
        for key in ("spans", "position")
    ),
    CrossRule("model.memory.placement.norm", _is_inserted, "model.memory stands in inserted blocks"),
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


def foreign_keys(cls: type[Config], node: Node, prefix: str = "") -> list[Ineffective]:
    """Every key that is set in a section of one kind and that only sections of other kinds have."""
    if not isinstance(node.value, dict):
        return []
    chosen, found = variant_at(cls, node), []
    for name in node.value:
        if name not in field_specs(chosen) and (reason := only_for(cls, name)):
            found.append(Ineffective(f"{prefix}{name}", reason, at_default=False))
    for name, spec in field_specs(chosen).items():
        if spec.section is not None and not spec.is_list and name in node.value:
            found += foreign_keys(spec.section, node.value[name], f"{prefix}{name}.")
    return found


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
