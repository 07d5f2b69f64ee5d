"""Log-probability of every token of a text, on any layout."""

from __future__ import annotations

from collections.abc import Sequence

from parallel.groups import ParallelGroups
from pretrain.data.one_text import TextWindows
from pretrain.engine.build import Chunk
from pretrain.engine.step import evaluation_loss
from pretrain.evaluation.evaluate import passes_over


def log_probabilities(
    chunks: Sequence[Chunk], text: TextWindows, groups: ParallelGroups, *, micro_batch_size: int, pipeline: int
) -> list[float]:
    """Log-probability of each token, in nats, given those before it in its window. Collective; all ranks know them.

    They are the parts of the loss that `evaluate` adds up: each token is a domain of its own.

    Args:
        micro_batch_size: windows per forward pass and rank.
        pipeline: stages; the number of microbatches of a pass is a multiple of it.
    """
    streams, passes = passes_over(text, chunks, groups, micro_batch_size=micro_batch_size, pipeline=pipeline)
    found = [0.0] * text.num_tokens
    for num_microbatches in passes:
        loss = evaluation_loss(
            chunks,
            streams,
            groups,
            num_microbatches=num_microbatches,
            micro_batch_size=micro_batch_size,
            sequence_length=text.sequence_length,
            num_domains=text.num_tokens,
        )
        # Every token is in one pass.
        found = [before - now.nats for before, now in zip(found, loss.by_domain, strict=True)]
    return found
