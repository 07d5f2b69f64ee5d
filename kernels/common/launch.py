"""Launches of the Triton kernels: their device, their sums' dtype, and their tiles. Importing this imports Triton.

Tile sizes are a closed form of widths and counts, so that all ranks launch the same kernels. Nothing is timed at run
time. Autotuning would have to be bounded, cached and agreed on between ranks, and the kernels wait for memory: what
matters is how wide the loads are, and how many are under way at once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

# Elements of a tile that one thread holds in registers: 32 sums in fp32, and the loads that feed them.
_PER_THREAD = 32
_WARP = 32
_MAX_COLUMNS = 1024
# Fewer programs than a GPU can keep in flight: then each takes more entries at once.
_FEW_PROGRAMS = 256


def sum_dtype(rows: Tensor) -> tl.dtype:
    """The dtype of sums of such rows."""
    return tl.float64 if rows.dtype == torch.float64 else tl.float32


def on_device_of(rows: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(rows.device) if rows.is_cuda else nullcontext()


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a table that one program has in registers."""

    entries: int
    """Rows, a power of two."""
    columns: int
    """Columns of each, a power of two; what is past the row's end is masked."""
    num_warps: int

    def column_tiles(self, width: int) -> int:
        """Tiles beside each other in a row."""
        return -(-width // self.columns)


def columns_of(width: int) -> int:
    """The widest power of two that masks at most a quarter: rows are read whole where that wastes little."""
    columns = _MAX_COLUMNS
    while columns > 8 and -(-width // columns) * columns * 3 > width * 4:
        columns //= 2
    return columns


def gather_tile(width: int, num_reads: int, num_programs: int) -> Tile:
    """Tile of `gather_sum` and `gather_dot`.

    Args:
        width: of a column group.
        num_reads: J.
        num_programs: with one program per token and column group.
    """
    columns = columns_of(width)
    num_warps = 8 if num_programs < _FEW_PROGRAMS else 4
    entries = max(1, num_warps * _WARP * _PER_THREAD // columns)
    return Tile(min(entries, _power_of_two(num_reads)), columns, num_warps)


def accumulate_tile(width: int) -> Tile:
    """Tile of `segment_accumulate`: fewer entries, because a tile takes as long as its longest run."""
    columns = columns_of(width)
    return Tile(max(1, min(32, 4 * _WARP * _PER_THREAD // 2 // columns)), columns, 4)


def run_length(num_entries: int) -> int:
    """Entries of one row that a program adds up one after the other; partial sums are then added up in the same way.

    Longer runs need less scratch memory, shorter ones less time for a row that every token reads.
    """
    return 32 if num_entries <= 1 << 18 else 128 if num_entries <= 1 << 22 else 512


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
