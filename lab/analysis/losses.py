"""Losses by the frequency of the token that is predicted, and without one memory layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray

from lab.analysis.deciles import NUM_BINS
from megamem.banks.controls import ControlledLookup
from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig
from pretrain.data.held_out import HeldOutDataset
from pretrain.engine.step import LossSum
from pretrain.evaluation.evaluate import evaluate, summed_losses


class _ByBin(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Held-out windows whose `domains` are the bins of their targets."""

    def __init__(self, held_out: HeldOutDataset, bin_of: NDArray[Any]) -> None:
        self._held_out, self._bin_of = held_out, torch.from_numpy(bin_of)

    def __len__(self) -> int:
        return len(self._held_out)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self._held_out[index]
        return {**window, "domains": self._bin_of[window["labels"]]}


def losses_by_bin(
    chunks: Sequence[MemoryGPTModel],
    held_out: HeldOutDataset,
    bin_of: NDArray[Any],
    config: RunConfig,
    groups: ParallelGroups,
) -> list[LossSum]:
    """Summed nats and number of held-out targets of each bin, and of those that are in none. Collective."""
    _, *of_bins = summed_losses(
        chunks,
        _ByBin(held_out, bin_of),
        groups,
        sequence_length=held_out.sequence_length,
        num_domains=NUM_BINS + 1,
        micro_batch_size=config.train.micro_batch_size,
        pipeline=config.parallel.pipeline,
    )
    return of_bins


def losses_without_layers(
    chunks: Sequence[MemoryGPTModel], held_out: HeldOutDataset, config: RunConfig, groups: ParallelGroups
) -> list[float]:
    """Nats per held-out token of the whole model, and then of it without each of its memory layers in turn (TIDE, App. H:
    what the layer adds is zero, and nothing else changes). Collective."""
    names = [config.model.memory_name(index) for index in range(config.model.num_memory_layers)]
    losses = []
    for name in (None, *names):
        with nullcontext() if name is None else without_memory(chunks, name):
            found = evaluate(
                chunks,
                held_out,
                groups,
                micro_batch_size=config.train.micro_batch_size,
                pipeline=config.parallel.pipeline,
            )
        losses.append(found.loss)
    return losses


@contextmanager
def reading_others(chunks: Sequence[MemoryGPTModel]) -> Iterator[None]:
    """Within it, every token reads the rows that one of another sequence asks for (`megamem.banks.controls`)."""
    # Chunks of one rank share what reads for all layers together.
    found: list[Any] = [reader for chunk in chunks for reader in (*chunk.memory_layers, *chunk.read_together)]
    readers = list(dict.fromkeys(found))
    lookups = [reader.lookup for reader in readers]
    for reader in readers:
        reader.lookup = ControlledLookup(reader.lookup, "others_rows")
    try:
        yield
    finally:
        for reader, lookup in zip(readers, lookups, strict=True):
            reader.lookup = lookup


@contextmanager
def without_memory(chunks: Sequence[MemoryGPTModel], name: str | None = None) -> Iterator[None]:
    """Within it, the memory layer of this name adds nothing, wherever it is; None: no memory layer does."""
    for chunk in chunks:
        chunk.set_memory_enabled(False, name)
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.set_memory_enabled(True)
