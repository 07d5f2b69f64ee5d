"""Count how often a text reads every row of a model's tables.

Legend: R rows of a bank, T tokens of a microbatch on this rank, J rows read per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.data.loader import SampleSource
from pretrain.engine.step import evaluation_loss
from pretrain.engine.tables.read_counts import ReadCounts
from pretrain.evaluation.evaluate import passes_over
from pretrain.progress import Progress


@dataclass(frozen=True)
class _LayerReads:
    """Rows that a layer shows, a tensor [T, J] per microbatch (`megamem.layers.usage.ReadObserver`)."""

    bank: int
    rows: list[Tensor] = field(default_factory=list)

    def record(self, rows: Tensor, scores: Tensor | None, out: Tensor, router: Tensor | None = None) -> None:
        """Keep the rows."""
        self.rows.append(rows)


def count_reads(
    chunks: Sequence[MemoryGPTModel],
    samples: SampleSource,
    groups: ParallelGroups,
    *,
    sequence_length: int,
    pipeline: int,
    progress: bool = False,
) -> Mapping[int, ReadCounts]:
    """Reads of all rows by bank, on rank 0; elsewhere nothing. Collective.

    Args:
        samples: sequences of the text, as many as fill every pass.
        pipeline: stages.
        progress: draw a bar (on rank 0).
    """
    model, layers = chunks[0].model_config, [layer for chunk in chunks for layer in chunk.memory_layers]
    counts = {
        layer.view.bank: torch.zeros(2, layer.view.num_bank_rows, dtype=torch.int64, device=groups.device)
        for layer in layers
    }
    streams, passes = passes_over(samples, chunks, groups, micro_batch_size=1, pipeline=pipeline)
    shown = progress and groups.is_main
    with Progress("counting reads", total=len(passes), leave=False) if shown else nullcontext() as bar:
        for num_microbatches in passes:
            shown_by = [_LayerReads(layer.view.bank) for layer in layers]
            for layer, observer in zip(layers, shown_by, strict=True):
                layer.usage = observer
            evaluation_loss(
                chunks,
                streams,
                groups,
                num_microbatches=num_microbatches,
                micro_batch_size=1,
                sequence_length=sequence_length,
            )
            for layer in layers:
                layer.usage = None
            for number in range(num_microbatches):
                for bank in counts:
                    _add(counts[bank], [each.rows[number] for each in shown_by if each.bank == bank], groups)
            if bar is not None:
                bar.update(1)
    return _of_all(counts, len(model.memory_plan.banks), len(samples), groups)


def _add(counts: Tensor, reads: Sequence[Tensor], groups: ParallelGroups) -> None:
    """Add the reads of one sequence, of which other ranks may have other tokens."""
    own = torch.cat([rows.reshape(-1).long() for rows in reads])
    for group in (groups.megatron.tp, groups.megatron.cp):
        if group.size() > 1:
            everyone = own.new_empty(group.size(), len(own))
            dist.all_gather_into_tensor(everyone.view(-1), own, group=group)
            own = everyone.view(-1)
    rows, times = own.unique(return_counts=True)
    counts[0].index_add_(0, rows, times)
    counts[1].index_add_(0, rows, torch.ones_like(times))


def _of_all(
    counts: Mapping[int, Tensor], num_banks: int, num_sequences: int, groups: ParallelGroups
) -> Mapping[int, ReadCounts]:
    """Sums over replicas, and over the layers of all stages."""
    found: dict[int, ReadCounts] = {}
    for each in counts.values():
        dist.all_reduce(each, group=groups.megatron.dp)
    for bank in range(num_banks):
        # One bank of all stages at a time.
        of_stages: list[Tensor | None] = [None] * groups.megatron.pp.size()
        own = counts[bank].cpu() if bank in counts else None
        dist.all_gather_object(of_stages, own, group=groups.megatron.pp)
        if groups.is_main:
            there = torch.stack([each for each in of_stages if each is not None])
            # Stages that have copies of a bank read the same rows of it.
            found[bank] = ReadCounts(there[:, 0].sum(0), there[:, 1].amax(0), num_sequences)
    return found
