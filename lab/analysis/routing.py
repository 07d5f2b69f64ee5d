"""Slot weights of token memories, by layer and by the frequency of the token (TIDE, Fig. 10; MoVE's gates)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from lab.analysis.deciles import NUM_BINS
from megamem.attention.documents import document_bounds
from megamem.chunk.inputs import Inputs
from megamem.layers.layer import MemoryLayer
from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.data.held_out import HeldOutDataset


@torch.no_grad()
def mean_weights(
    model: MemoryGPTModel,
    layers: Sequence[MemoryLayer],
    held_out: HeldOutDataset,
    bin_of: NDArray[Any],
    groups: ParallelGroups,
    *,
    num_slots: int,
    micro_batch_size: int,
) -> tuple[Tensor, Tensor]:
    """Mean weights of slots in some layers over the held-out tokens of each bin, on data-parallel ranks. Collective.

    Returns:
        [layers, bins, slots] float64, NaN in bins without a token; and tokens per bin [bins] float64.
    """
    device = groups.device
    bins = torch.from_numpy(bin_of).to(device)
    # One bin more for tokens that are in none, and one column for the number of tokens.
    sums = torch.zeros(len(layers), NUM_BINS + 1, num_slots + 1, dtype=torch.float64, device=device)
    with _watching(layers, sums, bins):
        show(model, held_out, groups, micro_batch_size=micro_batch_size)
    dist.all_reduce(sums)
    of_bins = sums[:, :NUM_BINS].cpu()
    return of_bins[:, :, :num_slots] / of_bins[:, :, num_slots:], of_bins[0, :, num_slots]


def show(model: MemoryGPTModel, held_out: HeldOutDataset, groups: ParallelGroups, *, micro_batch_size: int) -> None:
    """Show a model every held-out window of this data-parallel rank."""
    for first in range(groups.data_rank, len(held_out), groups.data_size * micro_batch_size):
        numbers = range(first, min(first + groups.data_size * micro_batch_size, len(held_out)), groups.data_size)
        windows = default_collate([held_out[number] for number in numbers])
        bounds = document_bounds(windows["position_ids"]) if model.separate_documents else None
        tokens, positions, labels = (windows[key].to(groups.device) for key in ("tokens", "position_ids", "labels"))
        model(tokens, positions, bounds, labels=labels)


@contextmanager
def _watching(layers: Sequence[MemoryLayer], sums: Tensor, bins: Tensor) -> Iterator[None]:
    handles = [
        layer.register_forward_hook(partial(_add, of_layer, bins)) for layer, of_layer in zip(layers, sums, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add(sums: Tensor, bins: Tensor, layer: MemoryLayer, arguments: tuple[Any, ...], _: Tensor) -> None:
    """Add a microbatch's weights to `sums` [bins + 1, slots + 1]."""
    weights = layer.slot_weights(*arguments).double()
    (inputs,) = (argument for argument in arguments if isinstance(argument, Inputs))
    counted = torch.cat((weights, weights.new_ones(len(weights), 1)), 1)
    sums.index_add_(0, bins[inputs.token_ids.flatten()], counted)
