"""Loss on held-out documents, in nats per token and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from parallel.groups import ParallelGroups
from pretrain.data.held_out import Domain, HeldOutDataset
from pretrain.data.loader import Sample, SampleSource, held_out_microbatches, on_device
from pretrain.engine.chunks import Chunk
from pretrain.engine.step import LossSum, evaluation_loss
from pretrain.progress import Progress

# Microbatches per pass through the pipeline; a multiple of every sensible number of stages, and enough to fill them.
_PASS_MICROBATCHES = 16


@dataclass(frozen=True)
class Evaluation:
    """Loss on the held-out documents.

    Attributes:
        loss: mean nats per target token.
        bits_per_byte: all targets' bits over the documents' UTF-8 bytes; end-of-document tokens cost bits and have no
            byte.
        num_tokens: targets.
        num_bytes: UTF-8 bytes of the documents.
        by_domain: evaluation of each domain by name, where there are several.
    """

    loss: float
    bits_per_byte: float
    num_tokens: int
    num_bytes: int
    by_domain: Mapping[str, Evaluation] = field(default_factory=dict)


class EvaluationStopped(Exception):
    """The evaluation was told to stop before its last pass, on all ranks."""


def evaluate(
    chunks: Sequence[Chunk],
    held_out: HeldOutDataset,
    groups: ParallelGroups,
    *,
    micro_batch_size: int,
    pipeline: int,
    progress: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Predict every held-out token once, whatever its domain. Collective.

    Args:
        micro_batch_size: windows per forward pass and rank.
        pipeline: stages; the number of microbatches of a pass is a multiple of it.
        progress: draw a bar (on rank 0).
        stopped: tells, on all ranks alike, whether to leave off; asked before each pass of some 16 microbatches.

    Raises:
        EvaluationStopped: `stopped` said so.
    """
    num_domains = len(held_out.domains) if len(held_out.domains) > 1 else 0
    losses = summed_losses(
        chunks,
        held_out,
        groups,
        sequence_length=held_out.sequence_length,
        num_domains=num_domains,
        micro_batch_size=micro_batch_size,
        pipeline=pipeline,
        progress=progress,
        stopped=stopped,
    )
    whole = Domain("", held_out.num_target_tokens, held_out.num_bytes)
    of_all, *of_domains = map(_evaluation, losses, (whole, *held_out.domains)[: len(losses)])
    names = [domain.name for domain in held_out.domains][:num_domains]
    return replace(of_all, by_domain=dict(zip(names, of_domains, strict=True)))


def summed_losses(
    chunks: Sequence[Chunk],
    dataset: SampleSource,
    groups: ParallelGroups,
    *,
    sequence_length: int,
    num_domains: int,
    micro_batch_size: int,
    pipeline: int,
    progress: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> list[LossSum]:
    """Summed losses of all samples, and then those of each domain, every sample once. Collective.

    Args:
        num_domains: numbers that samples have as `domains`; 0: they have none.
        micro_batch_size, pipeline, progress, stopped: arguments of `evaluate`.

    Raises:
        EvaluationStopped: `stopped` said so.
    """
    streams, passes = passes_over(dataset, chunks, groups, micro_batch_size=micro_batch_size, pipeline=pipeline)
    losses = [LossSum(0.0, 0.0)] * (1 + num_domains)
    shown = progress and groups.is_main
    with Progress("evaluating", total=len(passes), leave=False) if shown else nullcontext() as bar:
        for num_microbatches in passes:
            if stopped():
                raise EvaluationStopped
            loss = evaluation_loss(
                chunks,
                streams,
                groups,
                num_microbatches=num_microbatches,
                micro_batch_size=micro_batch_size,
                sequence_length=sequence_length,
                num_domains=num_domains,
            )
            losses = [
                LossSum(before.nats + now.nats, before.num_tokens + now.num_tokens)
                for before, now in zip(losses, (loss, *loss.by_domain), strict=True)
            ]
            if bar is not None:
                bar.update(1)
    return losses


def passes_over(
    dataset: SampleSource, chunks: Sequence[Chunk], groups: ParallelGroups, *, micro_batch_size: int, pipeline: int
) -> tuple[list[Iterator[Sample]], list[int]]:
    """Every sample once over all ranks: a stream of microbatches per model chunk, and how many of them each pass of the
    schedule takes.
    """
    # Interleaved stages want a multiple of the pipeline in every pass.
    num_microbatches = -(-len(dataset) // (micro_batch_size * groups.data_size * pipeline)) * pipeline
    per_pass = -(-_PASS_MICROBATCHES // pipeline) * pipeline
    streams = [
        on_device(
            held_out_microbatches(
                dataset,
                num_microbatches=num_microbatches,
                micro_batch_size=micro_batch_size,
                data_rank=groups.data_rank,
                data_size=groups.data_size,
            ),
            groups.device,
        )
        for _ in chunks
    ]
    return streams, [min(per_pass, num_microbatches - start) for start in range(0, num_microbatches, per_pass)]


def _evaluation(loss: LossSum, domain: Domain) -> Evaluation:
    assert round(loss.num_tokens) == domain.num_target_tokens, "evaluation did not see every held-out token once"
    # A part of one document may be bytes of nothing but the token that ends it.
    bits_per_byte = loss.nats / math.log(2) / domain.num_bytes if domain.num_bytes else math.nan
    return Evaluation(loss.nats / loss.num_tokens, bits_per_byte, domain.num_target_tokens, domain.num_bytes)
