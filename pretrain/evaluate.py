"""Loss on held-out documents, in nats per token and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from parallel.groups import ParallelGroups
from pretrain.build import Chunk
from pretrain.data.held_out import HeldOutDataset
from pretrain.data.loader import held_out_microbatches, on_device
from pretrain.progress import Progress
from pretrain.step import evaluation_loss

# Microbatches per pass through the pipeline; a multiple of every sensible number of stages, and enough to fill them.
_PASS_MICROBATCHES = 16


@dataclass(frozen=True)
class Evaluation:
    """What the held-out documents cost.

    Attributes:
        loss: mean nats per target token.
        bits_per_byte: all targets' bits over the documents' UTF-8 bytes; end-of-document tokens cost bits and have no
            byte.
        num_tokens: targets.
        num_bytes: UTF-8 bytes of the documents.
    """

    loss: float
    bits_per_byte: float
    num_tokens: int
    num_bytes: int


def evaluate(
    chunks: Sequence[Chunk],
    held_out: HeldOutDataset,
    groups: ParallelGroups,
    *,
    micro_batch_size: int,
    pipeline: int,
    progress: bool = False,
) -> Evaluation:
    """Predict every held-out token once. Collective.

    Args:
        micro_batch_size: windows per forward pass and rank.
        pipeline: stages; the number of microbatches of a pass is a multiple of it.
        progress: draw a bar (on rank 0).
    """
    # Interleaved stages want a multiple of the pipeline in every pass.
    num_microbatches = -(-len(held_out) // (micro_batch_size * groups.data_size * pipeline)) * pipeline
    per_pass = -(-_PASS_MICROBATCHES // pipeline) * pipeline
    streams = [
        on_device(
            held_out_microbatches(
                held_out,
                num_microbatches=num_microbatches,
                micro_batch_size=micro_batch_size,
                data_rank=groups.data_rank,
                data_size=groups.data_size,
            ),
            groups.device,
        )
        for _ in chunks
    ]
    nats = num_tokens = 0.0
    passes = range(0, num_microbatches, per_pass)
    shown = progress and groups.is_main
    with Progress("evaluating", total=len(passes), leave=False) if shown else nullcontext() as bar:
        for start in passes:
            loss = evaluation_loss(
                chunks,
                streams,
                groups,
                num_microbatches=min(per_pass, num_microbatches - start),
                micro_batch_size=micro_batch_size,
                sequence_length=held_out.sequence_length,
            )
            nats += loss.nats
            num_tokens += loss.num_tokens
            if bar is not None:
                bar.update(1)
    assert round(num_tokens) == held_out.num_target_tokens, "evaluation did not see every held-out token once"
    return Evaluation(
        nats / num_tokens, nats / math.log(2) / held_out.num_bytes, held_out.num_target_tokens, held_out.num_bytes
    )
