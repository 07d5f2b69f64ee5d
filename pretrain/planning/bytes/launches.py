"""Kernels that a microbatch launches, about: operations that `megamem dryrun --as-gpu` counts."""

from __future__ import annotations

from parallel.layout import columns_meet_first
from pretrain.config.context_ways import context_way
from pretrain.config.schema import RunConfig
from pretrain.planning.bytes.added_lookups import num_additions
from pretrain.planning.bytes.kept_streams import kept_streams
from pretrain.planning.bytes.row_bytes import has_scales
from pretrain.planning.counts.pipeline_stages import Blocks, Stage

LAUNCHES_DENSE = (11, 30)
"""Kernels of a block without its memory, forward and backward."""
LAUNCHES_MEMORY = (28, 67)
"""Kernels of a memory layer with a split table, forward and backward."""
LAUNCHES_ADDITION = 25
"""Kernels of these that sort a lookup's entries and add them up: none for a lookup that is added up as one with another."""
LAUNCHES_ROW_PARTS = (2, 4)
"""Kernels that parts of the rows add to such a layer: places in the part, sums of the parts."""
LAUNCHES_MEETING = (3, 1)
"""Kernels that columns which meet first add to these: shares of the tokens are cut, and sums added up twice."""
LAUNCHES_MIXTURE = (21, 59)
"""Kernels that a mixture's router and dispatcher add to a block."""
LAUNCHES_EXPERT = (5, 12)
"""Kernels that each of a rank's experts adds, one after the other."""
LAUNCHES_TILE = (6, 5)
"""Kernels of a tile of attention (`megamem.attention`): the fused one, and those that sum its outputs or gradients."""
LAUNCHES_GATHERED = (5, 9)
"""Kernels that gathered keys and values add to a block beside those of tiles: orders of ranks and of the sequence."""
LAUNCHES_HEADS = (7, 9)
"""Kernels that an exchange of tokens for heads adds to a block, whose attention is that of whole sequences."""
LAUNCHES_RING = (3, 1)
"""Kernels that a ring adds to a block, beside those of its steps: keys and values side by side, and where sums begin."""
LAUNCHES_RING_STEP = (LAUNCHES_TILE[0], LAUNCHES_TILE[1] + 2)
"""Kernels of a ring's step: of one tile, and in backward where its gradients begin, and their sum with those that come."""
LAUNCHES_SITES = {"mhc": (28, 80), "single_pass": (28, 80), "gated": (48, 78), "plain": (44, 98)}
"""Kernels that the two sites of several residual streams add to a block, forward and backward, by the kind of streams."""
LAUNCHES_STATIC_SITES = (12, 28)
"""Kernels of sites whose weights do not follow the streams."""
_GATHERED_TILES = 4
"""Tiles of a rank's two slices: each with the keys before it, but for the sequence's first, and with its own."""
KERNELS_PER_LAUNCH = 1.25
"""Kernels and memsets that a profiler sees, per operation that a dry run counts: sorts, sums that products split, attention's
backward and sums at repeated indices launch several. A microbatch of UltraMemV2-227M/1.2B has 3,410 for 2,720."""
LAUNCHES_AHEAD = 1024
"""Launches by which the host is ahead of the device at most: as many fit into the queue of a stream. No manual says
so; it is what those who timed it found (forums.developer.nvidia.com/t/68937)."""


def launches_of(config: RunConfig, stage: Stage, blocks: Blocks, way: int) -> float:
    """Kernels of a pass over a microbatch through some blocks of a stage, forward (0) or backward (1), about."""
    layout, train = config.parallel, config.train
    of_rows = LAUNCHES_ROW_PARTS[way] if layout.memory_rows > 1 else 0
    tokens = train.micro_batch_size * train.sequence_length // (layout.tensor * layout.context)
    if columns_meet_first(layout.memory_rows, layout.memory_columns, tokens):
        of_rows += LAUNCHES_MEETING[way]
    moe, memories = config.model.moe, float(stage.num_lookups * (LAUNCHES_MEMORY[way] + of_rows))
    if has_scales(config):
        # One product with the scale for what is gathered of each table; scores may have no gradient.
        for family in stage.families:
            of_lookup = len(family.memory.tables) - way * (not family.memory.lookup.learns_scores)
            memories += len(family.lookups) * of_lookup
    if way:
        memories -= LAUNCHES_ADDITION * (stage.num_backward_lookups - num_additions(config, stage, tokens))
    of_experts = 0
    if moe is not None:
        of_experts = LAUNCHES_MIXTURE[way] + moe.num_experts // layout.memory * LAUNCHES_EXPERT[way]
    share = blocks.memories / max(1, stage.blocks.memories)
    of_blocks = blocks.num * (
        LAUNCHES_DENSE[way] + launches_across_ranks(config, way) + _launches_of_sites(config, way)
    )
    mixed_again = way * kept_streams(config, stage).mixed_again * blocks.num / max(1, stage.backward.num)
    return of_blocks + blocks.ffns * of_experts + share * memories + mixed_again


def _launches_of_sites(config: RunConfig, way: int) -> int:
    streams = config.model.residual_streams
    if streams is None:
        return 0
    has_maps = streams.kind != "plain" or streams.dynamic
    return LAUNCHES_SITES[streams.kind][way] if has_maps else LAUNCHES_STATIC_SITES[way]


def launches_across_ranks(config: RunConfig, way: int) -> int:
    """Kernels that attention across cut sequences adds to a block, forward (0) or backward (1), in 16 bits.

    Messages are not among them. Separate documents have a tile each, and so more, as many as a batch has.
    """
    size = config.parallel.context
    if size == 1:
        return 0
    match context_way(config):
        case "gather":
            return LAUNCHES_GATHERED[way] + _GATHERED_TILES * LAUNCHES_TILE[way]
        case "heads":
            return LAUNCHES_HEADS[way]
        case "ring":
            return LAUNCHES_RING[way] + size * LAUNCHES_RING_STEP[way]
