"""Log-probability of every token of a text, on any layout."""

from __future__ import annotations

from collections.abc import Sequence

from parallel.groups import ParallelGroups
from pretrain.data.one_text import TextWindows
from pretrain.engine.chunks import Chunk
from pretrain.evaluation.evaluate import summed_losses


def log_probabilities(
    chunks: Sequence[Chunk], text: TextWindows, groups: ParallelGroups, *, micro_batch_size: int, pipeline: int
) -> list[float]:
    """Log-probability of each token, in nats, given those before it in its window. Collective; all ranks know them.

    They are the parts of the loss that `evaluate` adds up: each token is a domain of its own.

    Args:
        micro_batch_size: windows per forward pass and rank.
        pipeline: stages; the number of microbatches of a pass is a multiple of it.
    """
    _, *of_tokens = summed_losses(
        chunks,
        text,
        groups,
        sequence_length=text.sequence_length,
        num_domains=text.num_tokens,
        micro_batch_size=micro_batch_size,
        pipeline=pipeline,
    )
    # Every token is in one pass. A loss of 0 has no sign.
    return [0.0 - loss.nats for loss in of_tokens]
