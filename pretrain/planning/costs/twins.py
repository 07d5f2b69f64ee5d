"""Twins of a run with a memory: a dense model and a mixture of experts that cost what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megamem.config.model import ModelConfig
from pretrain.config.keys import without_ineffective
from pretrain.config.schema import RunConfig
from pretrain.planning.costs.equal_compute import (
    EqualExperts,
    FfnWidth,
    Measure,
    flops_measure,
    solve_experts,
    solve_ffn_width,
)
from pretrain.planning.costs.formulas import count_parameters


@dataclass(frozen=True)
class DenseTwin:
    """A run without its memory, with a wider feed-forward.

    Attributes:
        config: the run, without the keys that have no effect in it.
        solved: width of its feed-forward, and how far that misses.
    """

    config: RunConfig
    solved: FfnWidth


@dataclass(frozen=True)
class ExpertsTwin:
    """A run with experts in place of memory and feed-forward.

    Attributes:
        config: the run, without the keys that have no effect in it.
        solved: experts of the run, and how far they miss.
    """

    config: RunConfig
    solved: EqualExperts


def dense_twin(config: RunConfig, measure: Measure | None = None) -> DenseTwin | None:
    """The run without its memory, of as many forward FLOPs per token.

    None where there is no memory, or no feed-forward whose width could be solved for.

    Args:
        config: the run with the memory.
        measure: quantity to make equal; None: forward FLOPs per token.

    Raises:
        ValueError: no width can do it.
    """
    if not _has_twins(config):
        return None
    measure, bare = measure or flops_measure(config.train.sequence_length), _without_memory(config.model)
    # As wide tiles as GPUs like, where the rounding is below a percent.
    multiple = math.lcm(64 if bare.hidden_size >= 512 else 8, config.parallel.tensor)
    solved = solve_ffn_width(bare, measure, measure(config.model), multiple=multiple)
    model = replace(bare, ffn_hidden_size=solved.width)
    return DenseTwin(without_ineffective(replace(config, model=model)), solved)


def experts_twin(config: RunConfig, *, width_multiple: int = 8) -> ExpertsTwin | None:
    """The run as a mixture of experts of as many active parameters, and about as many in all.

    None where there is no memory, or no feed-forward in whose place experts could be.

    Args:
        config: the run with the memory. The ranks that split its tables share the experts.
        width_multiple: the inner width of an expert is a multiple of this.

    Raises:
        ValueError: no mixture can do it.
    """
    if not _has_twins(config):
        return None
    counts, bare = count_parameters(config.model), _without_memory(config.model)
    solved = solve_experts(
        bare,
        active=counts.active,
        total=counts.total,
        width_multiple=width_multiple,
        count_multiple=config.parallel.memory,
    )
    return ExpertsTwin(without_ineffective(replace(config, model=replace(bare, moe=solved.moe))), solved)


def _has_twins(config: RunConfig) -> bool:
    return config.model.memory is not None and config.model.moe is None


def _without_memory(model: ModelConfig) -> ModelConfig:
    return replace(model, memory=None, second_memory=None)
