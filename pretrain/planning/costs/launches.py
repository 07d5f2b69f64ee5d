"""Kernels that a microbatch launches, about: operations that `megamem dryrun --as-gpu` counts."""

from __future__ import annotations

from pretrain.config.schema import RunConfig
from pretrain.planning.costs.stages import Blocks, Stage

LAUNCHES_DENSE = (37, 42)
"""Kernels of a block without its memory, forward and backward."""
LAUNCHES_MEMORY = (33, 73)
"""Kernels of a memory layer with a split table, forward and backward."""
LAUNCHES_ROW_PARTS = (3, 4)
"""Kernels that parts of the rows add to such a layer: places in the part, sums of the parts."""
LAUNCHES_MIXTURE = (20, 56)
"""Kernels that a mixture's router and dispatcher add to a block."""
LAUNCHES_EXPERT = (6, 15)
"""Kernels that each of a rank's experts adds, one after the other."""
LAUNCHES_AHEAD = 1024
"""Launches by which the host is ahead of the device at most: as many fit into the queue of a stream. No manual says
so; it is what those who timed it found (forums.developer.nvidia.com/t/68937)."""


def launches_of(config: RunConfig, stage: Stage, blocks: Blocks, way: int) -> float:
    """Kernels of a pass over a microbatch through some blocks of a stage, forward (0) or backward (1), about."""
    of_rows = LAUNCHES_ROW_PARTS[way] if config.parallel.memory_rows > 1 else 0
    moe, memories = config.model.moe, len(stage.lookups) * (LAUNCHES_MEMORY[way] + of_rows)
    of_experts = 0
    if moe is not None:
        of_experts = LAUNCHES_MIXTURE[way] + moe.num_experts // config.parallel.memory * LAUNCHES_EXPERT[way]
    share = blocks.memories / max(1, stage.blocks.memories)
    return blocks.num * LAUNCHES_DENSE[way] + blocks.ffns * of_experts + share * memories
