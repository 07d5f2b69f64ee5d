"""Counter-based random tensors: element (i, j, ...) of the tensor `name` is a function of (seed, name, i, j, ...) alone.

A rank fills just its shard, and gets the same numbers as any other layout does: no rank ever holds a full table, and initial weights do
not depend on tensor, pipeline or memory parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megamem.hashing import key_of, mix

# Temporaries of the fill are a few int64 and float64 tensors of this many elements.
_CHUNK_ELEMENTS = 1 << 20


def fill_normal(
    out: Tensor, *, seed: int, name: str, std: float, global_shape: Sequence[int], offset: Sequence[int]
) -> None:
    """Fill a shard with N(0, std^2), by Box-Muller on the two halves of one 64-bit hash per element.

    Args:
        out: the shard, any floating dtype; written in place.
        seed: the run's seed.
        name: the tensor's global name.
        std: standard deviation.
        global_shape: shape of the whole tensor.
        offset: where the shard starts in it, per dimension.
    """
    _fill(out, seed, name, global_shape, offset, lambda bits: _standard_normal(bits) * std)


def normal_rows(rows: Tensor, *, seed: int, name: str, std: float, width: int) -> Tensor:
    """Some rows of the table [anything, width] that `fill_normal` would fill, without the others.

    Args:
        rows: [n] int64, on any device.
        seed: the run's seed.
        name: the table's global name.
        std: standard deviation.
        width: columns of the table.

    Returns:
        [n, width] fp32.
    """
    key = key_of(seed, name)
    out = torch.empty(len(rows), width, device=rows.device)
    columns = torch.arange(width, dtype=torch.int64, device=rows.device)
    rows_per_chunk = max(1, _CHUNK_ELEMENTS // width)
    for part, into in zip(rows.split(rows_per_chunk), out.split(rows_per_chunk), strict=True):
        into.copy_(_standard_normal(mix(part.unsqueeze(1) * width + columns, key)) * std)
    return out


def fill_uniform(
    out: Tensor,
    *,
    seed: int,
    name: str,
    high: float,
    low: float = 0.0,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> None:
    """Fill a shard with U(low, high); see `fill_normal`."""
    _fill(out, seed, name, global_shape, offset, lambda bits: _unit(bits >> 32) * (high - low) + low)


def _standard_normal(bits: Tensor) -> Tensor:
    radius = torch.sqrt(-2.0 * torch.log(_unit(bits >> 32)))
    return radius * torch.cos(2.0 * math.pi * _unit(bits))


def _unit(bits: Tensor) -> Tensor:
    """The low 32 bits as a float64 strictly between 0 and 1."""
    return ((bits & 0xFFFFFFFF).double() + 0.5) * 2.0**-32


def _fill(out, seed, name, global_shape, offset, transform) -> None:  # type: ignore[no-untyped-def]
    key = key_of(seed, name)
    row_shape = out.shape[1:]
    row_index = _row_index(row_shape, global_shape[1:], offset[1:], out.device)
    row_stride = math.prod(global_shape[1:])
    rows_per_chunk = max(1, _CHUNK_ELEMENTS // max(1, row_index.numel()))
    with torch.no_grad():
        for start in range(0, out.shape[0], rows_per_chunk):
            stop = min(start + rows_per_chunk, out.shape[0])
            rows = torch.arange(start, stop, dtype=torch.int64, device=out.device) + offset[0]
            counter = rows.unsqueeze(1) * row_stride + row_index
            out[start:stop].copy_(transform(mix(counter, key)).view(stop - start, *row_shape))


def _row_index(
    shape: Sequence[int], global_shape: Sequence[int], offset: Sequence[int], device: torch.device
) -> Tensor:
    """Flat positions, within one global row, of the elements of one local row: [prod(shape)] int64."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for size, global_size, start in zip(shape, global_shape, offset, strict=True):
        along = torch.arange(size, dtype=torch.int64, device=device) + start
        index = (index.unsqueeze(1) * global_size + along).flatten()
    return index
