"""Counter-based random tensors: element (i, j, ...) of a tensor is a function of (seed, its name, i, j, ...).

A rank fills just its shard, and gets the same numbers as any other layout does: no rank ever holds a full table, and
initial weights do not depend on tensor, pipeline or memory parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megamem.hashing import key_of, mix

# Temporaries of the fill are a few int64 and float64 tensors of so many elements: few launches on a GPU, the cache on a
# CPU.
_TEMPORARY_ELEMENTS = {"cuda": 1 << 22, "cpu": 1 << 16}


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
    rows_at_once = _rows_at_once(width, rows.device)
    for some, into in zip(rows.split(rows_at_once), out.split(rows_at_once), strict=True):
        into.copy_(_standard_normal(mix(some.unsqueeze(1) * width + columns, key)) * std)
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
    shape, global_shape, offset = _merge_whole_dims(out, global_shape, offset)
    rows_of_out = out.view(shape)
    row_index = _row_index(shape[1:], global_shape[1:], offset[1:], out.device)
    row_stride = math.prod(global_shape[1:])
    rows_at_once = _rows_at_once(row_index.numel(), out.device)
    with torch.no_grad():
        for start in range(0, shape[0], rows_at_once):
            stop = min(start + rows_at_once, shape[0])
            rows = torch.arange(start, stop, dtype=torch.int64, device=out.device) + offset[0]
            counter = rows.unsqueeze(1) * row_stride + row_index
            rows_of_out[start:stop].copy_(transform(mix(counter, key)).view(stop - start, *shape[1:]))


def _rows_at_once(row_elements: int, device: torch.device) -> int:
    return max(1, _TEMPORARY_ELEMENTS[device.type] // max(1, row_elements))


def _merge_whole_dims(
    out: Tensor, global_shape: Sequence[int], offset: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """The same numbers in the same order, with a dimension that is not split merged into the one before it.

    Keys [H, 2, N, d, R] of a single head would else be one row, and the temporaries as large as they are. Views that
    skip stay as they are.
    """
    merged = [(out.shape[0], global_shape[0], offset[0])]
    for dim in range(1, out.dim()):
        size, global_size = out.shape[dim], global_shape[dim]
        if size == global_size and out.stride(dim - 1) == size * out.stride(dim):
            local, whole, start = merged.pop()
            merged.append((local * size, whole * size, start * size))
        else:
            merged.append((size, global_size, offset[dim]))
    shape, global_shape, offset = (list(column) for column in zip(*merged, strict=True))
    return shape, global_shape, offset


def _row_index(
    shape: Sequence[int], global_shape: Sequence[int], offset: Sequence[int], device: torch.device
) -> Tensor:
    """Flat positions, within one global row, of the elements of one local row: [prod(shape)] int64."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for size, global_size, start in zip(shape, global_shape, offset, strict=True):
        along = torch.arange(size, dtype=torch.int64, device=device) + start
        index = (index.unsqueeze(1) * global_size + along).flatten()
    return index
