"""Residual streams that backward keeps, and those that it mixes again, of the sites of a stage."""

from __future__ import annotations

from dataclasses import dataclass

from megamem.parameters.trained_part import TrainedPart
from megamem.placement.block_plan import PLAIN, plan_blocks
from pretrain.config.schema import RunConfig
from pretrain.planning.counts.pipeline_stages import Stage
from pretrain.planning.counts.residual_streams import SITES_PER_BLOCK


@dataclass(frozen=True)
class KeptStreams:
    """Streams [n, D] of a token, of a forward pass through each of a stage's chunks.

    Attributes:
        per_block: streams that are kept for the sites of a block, the mean over blocks with a backward pass.
        mixed_again: streams that backward mixes again.
        at_once: streams of these that are there together when backward of blocks begins.
    """

    per_block: float
    mixed_again: int = 0
    at_once: int = 0


def kept_streams(config: RunConfig, stage: Stage) -> KeptStreams:
    """Streams of every site, or those with which chains begin (`megamem.residual_streams.recomputed`)."""
    streams, most_blocks = config.model.residual_streams, config.train.recompute_streams
    if streams is None:
        return KeptStreams(0.0)
    if most_blocks is None or not stage.backward.num:
        return KeptStreams(SITES_PER_BLOCK)
    first_block = TrainedPart.of(config.model, config.optimizer.trained).first_block
    plans = plan_blocks(config.model)
    chains: list[int] = []
    of_ends = 0
    for chunk in stage.chunks:
        left = 0
        for block in chunk.layers:
            if block < first_block:
                continue
            if not left or plans.get(block, PLAIN).has_memory_at_entry:
                left, chains = most_blocks, [*chains, -1]
            # Those before each of its sites, but for the first of a chain.
            left, chains[-1] = left - 1, chains[-1] + SITES_PER_BLOCK
        # The end of plain streams is a sum, which needs none.
        of_ends += chunk.has_loss and bool(chunk.layers) and streams.kind != "plain"
    return KeptStreams(len(chains) / stage.backward.num, sum(chains) + of_ends, chains[-1])
