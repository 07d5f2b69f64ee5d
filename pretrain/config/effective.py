"""Options without effect: which fields are not read, given the others.

A field says so itself where the condition is about its own section (`EffectiveWhen`); what depends on another section stands in
`RUN_RULES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kernels.implementations import Implementation
from megamem.config_base import Config, field_specs
from megamem.retrieval.config import ProductKeyConfig, TuckerConfig
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


def _has_groups(run: RunConfig) -> bool:
    return run.model.memory is not None or run.model.moe is not None


def _has_pre_values(run: RunConfig) -> bool:
    return run.model.memory is not None and run.model.memory.width("pre_values") > 0


def _has_tucker_cores(run: RunConfig) -> bool:
    return isinstance(run.model.memory, TuckerConfig)


def _has_product_keys(run: RunConfig) -> bool:
    return isinstance(run.model.memory, ProductKeyConfig)


def _reads_pairs(run: RunConfig) -> bool:
    return _has_pre_values(run) and run.parallel.memory == 1


def _is_naive(run: RunConfig, override: Implementation | None) -> bool:
    return (override or run.train.kernels) == "naive"


def _pair_is_set(run: RunConfig) -> bool:
    """Whether values and pre-values are read by an implementation of the pair, whatever the two gathers are."""
    return _reads_pairs(run) and run.train.kernel_overrides.gather_pair is not None


def _reads_sums(run: RunConfig) -> bool:
    return _has_memory(run) and not _pair_is_set(run)


def _reads_products(run: RunConfig) -> bool:
    gather_sum_is_naive = _is_naive(run, run.train.kernel_overrides.gather_sum)
    return _reads_sums(run) and (_has_pre_values(run) or not gather_sum_is_naive)


def _accumulates(run: RunConfig) -> bool:
    overrides = run.train.kernel_overrides
    if _pair_is_set(run):
        return not _is_naive(run, overrides.gather_pair)
    gather_dot_accumulates = _has_pre_values(run) and not _is_naive(run, overrides.gather_dot)
    return _has_memory(run) and (gather_dot_accumulates or not _is_naive(run, overrides.gather_sum))


RUN_RULES: tuple[CrossRule, ...] = (
    CrossRule("parallel.memory", _has_groups, "model.memory or model.moe is set"),
    CrossRule("parallel.overlap_memory", _has_memory, "model.memory is set"),
    CrossRule("train.kernels", _has_memory, "model.memory is set"),
    CrossRule(
        "train.kernel_overrides.gather_sum",
        _reads_sums,
        "model.memory is set and train.kernel_overrides.gather_pair does not read values and pre-values in its place",
    ),
    CrossRule(
        "train.kernel_overrides.gather_dot",
        _reads_products,
        "model.memory has pre-values or a gather_sum that is not naive (whose gradient it computes), and train.kernel_overrides.gather_pair does not read in its place",
    ),
    CrossRule(
        "train.kernel_overrides.gather_pair",
        _reads_pairs,
        "model.memory has pre-values (pre_value_dim above 0, or kind peer) and parallel.memory is 1 (ranks that share tables add up products before the activation)",
    ),
    CrossRule(
        "train.kernel_overrides.segment_accumulate",
        _accumulates,
        "model.memory is set and a gather is not naive (a naive gather leaves its gradients to autograd)",
    ),
    CrossRule("train.kernel_overrides.tucker_topk", _has_tucker_cores, "model.memory.kind is ultramem_v2 or ultramem"),
    CrossRule(
        "train.kernel_overrides.product_topk", _has_product_keys, "model.memory.kind is pkm, memory_plus or peer"
    ),
    CrossRule("logging.memory_every_steps", _has_memory, "model.memory is set"),
    CrossRule("optimizer.value_weight_decay", _has_memory, "model.memory is set"),
    CrossRule("optimizer.value_clip_grad", _has_memory, "model.memory is set"),
    CrossRule("optimizer.value_offload", _has_memory, "model.memory is set"),
    CrossRule("optimizer.value_lr", _has_memory, "model.memory is set"),
    CrossRule("optimizer.value_lr_multiplier", _has_memory, "model.memory is set"),
    CrossRule("optimizer.value_lr_end_multiplier", _has_memory, "model.memory is set"),
    CrossRule("optimizer.value_lr_decay_tokens", _has_memory, "model.memory is set"),
    CrossRule(
        "optimizer.pre_value_lr_multiplier",
        _has_pre_values,
        "model.memory has pre-values",
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
                owner: Any = config
                *path, name = rule.key.split(".")
                for segment in path:
                    owner = getattr(owner, segment)
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
