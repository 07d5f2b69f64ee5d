"""Work that runs beside other work on a GPU, as far as a configuration decides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from megamem.placement.block_plan import reads_beside_ffn
from pretrain.config.schema import RunConfig


class Queues(TypedDict):
    """Arguments of `parallel.machine.environment.settle_environment` that follow from layouts."""

    tensor: int
    context: int
    memory_beside: bool


def memory_runs_beside(config: RunConfig) -> bool:
    """Tell whether lookups in split tables run on a stream of their own, beside the feed-forwards of their blocks."""
    layout = config.parallel
    return layout.memory > 1 and layout.overlap_memory and reads_beside_ffn(config.model)


def queues_of(configs: Sequence[RunConfig]) -> Queues:
    """Facts of the layouts that one process may have, by which the queues of its GPU are chosen."""
    return Queues(
        tensor=max(config.parallel.tensor for config in configs),
        context=max(config.parallel.context for config in configs),
        memory_beside=any(map(memory_runs_beside, configs)),
    )
