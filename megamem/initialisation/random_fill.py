"""Counter-based random tensors: element (i, j, ...) of a tensor is a function of (seed, its name, i, j, ...).

A rank fills just its shard, and gets the same numbers as any other layout does: no rank ever holds a full table, and
initial weights do not depend on tensor, pipeline or memory parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from kernels.common.hashing import mix
from megamem.banks.hashing import key_of
from megamem.initialisation.distributions import Constant, Distribution, Normal, Uniform

# Temporaries are a few int64 and float64 tensors of so many elements: few launches on a GPU, the cache on a CPU.
_TEMPORARY_ELEMENTS = {"cuda": 1 << 22, "cpu": 1 << 16}
# Parts that a thread takes at once, and fewer of which are not worth threads.
_PARTS_AT_ONCE = 16


def fill(
    out: Tensor,
    distribution: Distribution,
    *,
    seed: int,
    name: str,
    global_shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> None:
    """Fill a shard with its numbers of a distribution: of one 64-bit hash per element, by Box-Muller where normal.

    Args:
        out: the shard, any floating dtype; written in place.
        name: the tensor's global name.
        global_shape: shape of the whole tensor; None: that of the shard.
        offset: start of the shard in the whole tensor, per dimension; None: its origin.
    """
    if isinstance(distribution, Constant):
        out.detach().fill_(distribution.value)
        return
    key = key_of(seed, name)
    shape, global_shape, offset = _merge_whole_dims(out, global_shape or out.shape, offset or (0,) * out.dim())
    rows_of_out = out.detach().view(shape)
    row_index = _row_index(shape[1:], global_shape[1:], offset[1:], out.device)
    row_stride = math.prod(global_shape[1:])
    rows_at_once = _rows_at_once(row_index.numel(), out.device)

    def fill_from(start: int) -> None:
        stop = min(start + rows_at_once, shape[0])
        rows = torch.arange(start, stop, dtype=torch.int64, device=out.device) + offset[0]
        bits = mix(rows.unsqueeze(1) * row_stride + row_index, key)
        rows_of_out[start:stop].copy_(_drawn(distribution, bits).view(stop - start, *shape[1:]))

    # Tensors without data (a dry run's) belong to a mode of this thread.
    has_threads = rows_of_out.device.type == "cpu" and type(rows_of_out) is Tensor
    _for_each(fill_from, range(0, shape[0], rows_at_once), torch.get_num_threads() if has_threads else 1)


def _for_each(work: Callable[[int], None], starts: range, num_threads: int) -> None:
    """Call `work` for each start, in threads that have one core each.

    PyTorch's own threads would share every operation and wait for each other behind it: a core that others use, too, holds
    up both, which took ten times as long.
    """
    shares = [starts[first : first + _PARTS_AT_ONCE] for first in range(0, len(starts), _PARTS_AT_ONCE)]
    if num_threads == 1 or len(shares) < num_threads:
        for start in starts:
            work(start)
        return

    def work_on(share: range) -> None:
        for start in share:
            work(start)

    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work_on, shares):
                pass
    finally:
        # Threads that begin later, as those of backward passes, take the number that was set last.
        torch.set_num_threads(num_threads)


def _drawn(distribution: Normal | Uniform, bits: Tensor) -> Tensor:
    if isinstance(distribution, Normal):
        return _standard_normal(bits) * distribution.std
    return _unit(bits >> 32) * (distribution.high - distribution.low) + distribution.low


def normal_rows(rows: Tensor, *, seed: int, name: str, std: float, width: int) -> Tensor:
    """Some rows of the table [anything, width] that `fill` would fill with N(0, std^2), without the others.

    Args:
        rows: [n] int64, on any device.
        name: the table's global name.
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


def _standard_normal(bits: Tensor) -> Tensor:
    radius = torch.sqrt(-2.0 * torch.log(_unit(bits >> 32)))
    return radius * torch.cos(2.0 * math.pi * _unit(bits))


def _unit(bits: Tensor) -> Tensor:
    """The low 32 bits as a float64 strictly between 0 and 1."""
    return ((bits & 0xFFFFFFFF).double() + 0.5) * 2.0**-32


def _rows_at_once(row_elements: int, device: torch.device) -> int:
    return max(1, _TEMPORARY_ELEMENTS[device.type] // max(1, row_elements))


def _merge_whole_dims(
    out: Tensor, global_shape: Sequence[int], offset: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Shapes and offset of the same numbers in the same order, each whole dimension merged into the one before it.

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
