"""The dense twin of a run with a memory, which costs what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pretrain.config.keys import without_ineffective
from pretrain.config.schema import RunConfig
from pretrain.planning.counts.equal_compute import FfnWidth, Measure, flops_measure, solve_ffn_width


@dataclass(frozen=True)
class DenseTwin:
    """A run without its memory, with a wider feed-forward.

    Attributes:
        config: the run, without the keys that have no effect in it.
        solved: width of its feed-forward, and how far that misses.
    """

    config: RunConfig
    solved: FfnWidth


def dense_twin(config: RunConfig, measure: Measure | None = None) -> DenseTwin | None:
    """The run without its memory, of as many forward FLOPs per token.

    None where there is no memory, or no feed-forward whose width could be solved for.

    Args:
        config: the run with the memory.
        measure: quantity to make equal; None: forward FLOPs per token.

    Raises:
        ValueError: no width can do it.
    """
    if config.model.memory is None or config.model.moe is not None:
        return None
    bare = replace(config.model, memory=None, second_memory=None)
    measure = measure or flops_measure(config.train.sequence_length)
    # As wide tiles as GPUs like, where the rounding is below a percent.
    multiple = math.lcm(64 if bare.hidden_size >= 512 else 8, config.parallel.tensor)
    solved = solve_ffn_width(bare, measure, measure(config.model), multiple=multiple)
    model = replace(bare, ffn_hidden_size=solved.width)
    return DenseTwin(without_ineffective(replace(config, model=model)), solved)
