"""Memories that n-grams address: hits and collisions of rows in the training data, gates by how often an n-gram comes
there, and the loss with rows of other tokens.

Legend: U different n-grams, H heads, s tokens of a sequence, b sequences, N tokens of the longest n-gram.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lab.analysis.routing import show
from megamem.chunk.halo import UNCUT
from megamem.chunk.inputs import Inputs
from megamem.config.memory import Ngrams
from megamem.layers.layer import MemoryLayer
from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.config.schema import DatasetEntry
from pretrain.data.held_out import HeldOutDataset
from pretrain.data.manifest import TRAIN, open_dataset

COUNT_STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Least counts of the bins: an n-gram that never came, one that came once, two or three times, and so on."""

_NGRAMS_AT_ONCE = 2**16
_SEED = 1


@dataclass(frozen=True)
class Counted:
    """Different n-grams of one order in a sample of the training data.

    Attributes:
        keys: [U] int64, ascending.
        counts: [U] int64, how often each comes.
        tokens: [n, U] int64, the ids of one of them as they stand in the text.
    """

    keys: NDArray[np.int64]
    counts: NDArray[np.int64]
    tokens: NDArray[np.int64]


@dataclass(frozen=True)
class Loads:
    """Rows of one layer's heads of one order, as the sample reads them.

    Attributes:
        rows: size of these heads' tables.
        rows_read: rows that some n-gram of the sample reads.
        ngrams: different n-grams.
        ngrams_per_row: the mean over rows that are read; 1 without collisions.
        most_ngrams: n-grams of the row that has most.
        alone: share of reads of rows that one n-gram has for itself.
        hottest_row: share of a head's reads that its hottest row has, the largest of the heads.
        hottest_percent: share of all reads that the hottest hundredth of the rows has.
    """

    rows: int
    rows_read: int
    ngrams: int
    ngrams_per_row: float
    most_ngrams: int
    alone: float
    hottest_row: float
    hottest_percent: float


def sampled_streams(entries: Sequence[DatasetEntry], num_tokens: int) -> list[NDArray[np.int64]]:
    """The first token ids of every data set's training documents, `num_tokens` in all where there are as many."""
    streams = []
    for entry in entries:
        dataset = open_dataset(entry.path)
        stream = np.memmap(f"{dataset.prefix(TRAIN)}.bin", dataset.open_split(TRAIN).index.dtype, mode="r")
        streams.append(np.asarray(stream[: num_tokens // len(entries)]).astype(np.int64))
    return streams


def counted_ngrams(streams: Sequence[NDArray[np.int64]], layer: MemoryLayer, order: int) -> Counted:
    """The n-grams of `order` tokens in these streams; those that the layer's hashes cannot tell apart are one."""
    windows = [np.lib.stride_tricks.sliding_window_view(x, order) for x in streams if len(x) >= order]
    tokens = np.concatenate(windows).T
    keys = _keys(layer, torch.from_numpy(np.ascontiguousarray(tokens)).to(_device_of(layer))).cpu().numpy()
    found, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return Counted(found, counts, np.ascontiguousarray(tokens[:, first]))


def _device_of(layer: MemoryLayer) -> torch.device:
    return next(layer.parameters()).device


def _keys(layer: MemoryLayer, tokens: Tensor) -> Tensor:
    """int64 keys [...] of n-grams [n, ...]: 64 bits of hash, by which two of a million share one with a chance below 1e-7."""
    key = torch.zeros_like(tokens[0])
    for ids in layer.hashed_ids(tokens):
        # SplitMix64, whose multiplications wrap and whose shifts are logical.
        z = (key ^ ids) * -7046029254386353131 + 0x1F123BB5
        z = (z ^ ((z >> 30) & (2**34 - 1))) * -4658895280553007687
        z = (z ^ ((z >> 27) & (2**37 - 1))) * -7723592293110705685
        key = z ^ ((z >> 31) & (2**33 - 1))
    return key


@torch.no_grad()
def loads_of(layers: Sequence[MemoryLayer], ngrams: Ngrams, counted: Counted) -> list[Loads]:
    """Loads of each layer's heads whose n-grams were counted."""
    order, num = counted.tokens.shape
    rows = torch.cat(
        [_rows(layers, counted.tokens[:, start : start + _NGRAMS_AT_ONCE]) for start in range(0, num, _NGRAMS_AT_ONCE)],
        1,
    )
    found = []
    for sizes, of_layer in zip(ngrams.head_rows, rows.chunk(len(layers)), strict=True):
        per_order = len(sizes) // (ngrams.max_order - 1)
        heads = range((order - 2) * per_order, (order - 1) * per_order)
        found.append(
            _load([of_layer[head].numpy() - sum(sizes[:head]) for head in heads], [sizes[h] for h in heads], counted)
        )
    return found


def _rows(layers: Sequence[MemoryLayer], tokens: NDArray[np.int64]) -> Tensor:
    """[layers H, U] rows that n-grams [n, U] address, as texts of their own."""
    ids = torch.from_numpy(np.ascontiguousarray(tokens)).to(_device_of(layers[0]))
    places = torch.arange(len(ids), device=ids.device).unsqueeze(1).expand_as(ids)
    rows = type(layers[0]).addresses(layers, ids, places, UNCUT)
    assert rows is not None
    return rows[:, -1].cpu()


def _load(rows: Sequence[NDArray[np.int64]], sizes: Sequence[int], counted: Counted) -> Loads:
    ngrams = [np.bincount(of_head, minlength=size) for of_head, size in zip(rows, sizes, strict=True)]
    reads = [
        np.bincount(of_head, weights=counted.counts, minlength=size) for of_head, size in zip(rows, sizes, strict=True)
    ]
    all_ngrams, all_reads = np.concatenate(ngrams), np.concatenate(reads)
    total, rows_read = float(all_reads.sum()), int((all_ngrams > 0).sum())
    hottest = max(1, len(all_reads) // 100)
    return Loads(
        rows=len(all_reads),
        rows_read=rows_read,
        ngrams=len(counted.counts),
        ngrams_per_row=float(all_ngrams.sum()) / rows_read,
        most_ngrams=int(all_ngrams.max()),
        alone=float(all_reads[all_ngrams == 1].sum()) / total,
        hottest_row=max(float(of_head.max() / of_head.sum()) for of_head in reads),
        hottest_percent=float(np.partition(all_reads, -hottest)[-hottest:].sum()) / total,
    )


@torch.no_grad()
def gates_by_count(
    model: MemoryGPTModel,
    layers: Sequence[MemoryLayer],
    held_out: HeldOutDataset,
    counted: Counted,
    groups: ParallelGroups,
    *,
    micro_batch_size: int,
) -> tuple[Tensor, Tensor]:
    """Mean gate of every layer over held-out tokens by how often the n-gram that ends there was counted.

    Tokens that have too few before them are left out. On data-parallel ranks. Collective.

    Returns:
        [layers, bins] float64, NaN in bins without a token; and tokens per bin [bins] float64.
    """
    device, order = groups.device, len(counted.tokens)
    keys, counts = torch.from_numpy(counted.keys).to(device), torch.from_numpy(counted.counts).to(device)
    steps = torch.tensor(COUNT_STEPS, device=device)
    sums = torch.zeros(len(layers), len(COUNT_STEPS) + 1, 2, dtype=torch.float64, device=device)

    def add(layer: MemoryLayer, arguments: tuple[Any, ...], _: Tensor) -> None:
        (inputs,) = (each for each in arguments if isinstance(each, Inputs))
        ids, places = inputs.token_ids, inputs.positions
        of_tokens = _keys(layer, torch.stack([ids.roll(lag, 0) for lag in reversed(range(order))]))
        at = torch.searchsorted(keys, of_tokens).clamp_max(len(keys) - 1)
        seen = torch.where(keys[at] == of_tokens, counts[at], 0)
        bins = torch.searchsorted(steps, seen, right=True) - 1
        bins = torch.where(places >= order - 1, bins, len(COUNT_STEPS))
        gates = layer.slot_weights(*arguments).double()
        sums[layer.place].index_add_(0, bins.flatten(), torch.cat((gates, torch.ones_like(gates)), 1))

    handles = [layer.register_forward_hook(add) for layer in layers]
    try:
        show(model, held_out, groups, micro_batch_size=micro_batch_size)
    finally:
        for handle in handles:
            handle.remove()
    dist.all_reduce(sums)
    of_bins = sums[:, :-1].cpu()
    return of_bins[..., 0] / of_bins[..., 1], of_bins[0, :, 1]


@contextmanager
def shuffled_addresses(layers: Sequence[MemoryLayer]) -> Iterator[None]:
    """Within it, every token reads, in these layers, the rows of another token of its microbatch, drawn from a seed."""
    generator = torch.Generator().manual_seed(_SEED)

    def shuffle(layer: MemoryLayer, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_shuffled(each, generator) if isinstance(each, Inputs) else each for each in arguments)

    handles = [layer.register_forward_pre_hook(shuffle) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shuffled(inputs: Inputs, generator: torch.Generator) -> Inputs:
    assert inputs.packed is not None
    own, rows = inputs.packed[:2], inputs.packed[2:]
    order = torch.randperm(own[0].numel(), generator=generator).to(rows.device)
    return replace(inputs, packed=torch.cat((own, rows.flatten(1)[:, order].view_as(rows))))
