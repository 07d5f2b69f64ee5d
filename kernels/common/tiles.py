"""Tile sizes of the Triton kernels: a closed form of widths and counts, so that all ranks launch the same kernels.

Nothing is timed at run time. Autotuning would have to be bounded, cached and agreed on between ranks, and the kernels
wait for memory: what matters is how wide the loads are, and how many are under way at once.
"""

from __future__ import annotations

from dataclasses import dataclass

# Elements of a tile that one thread holds in registers: 32 sums in fp32, and the loads that feed them.
_PER_THREAD = 32
_WARP = 32
_MAX_COLUMNS = 1024
# Fewer programs than a GPU can keep in flight: then each takes more entries at once.
_FEW_PROGRAMS = 256
# Fewer entries than this do not pay for a program of their own, and a row of scratch.
_MIN_SPLIT = 16


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


def gather_tile(width: int, num_reads: int, num_programs: int, per_thread: int = _PER_THREAD) -> Tile:
    """Tile of `gather_sum` and `gather_dot`.

    Args:
        width: of a column group.
        num_reads: J.
        num_programs: with one program per token and column group.
        per_thread: elements of a tile.
    """
    columns = columns_of(width)
    num_warps = 8 if num_programs < _FEW_PROGRAMS else 4
    entries = max(1, num_warps * _WARP * per_thread // columns)
    return Tile(min(entries, _power_of_two(num_reads)), columns, num_warps)


def pair_tile(width: int, num_reads: int, num_programs: int) -> Tile:
    """Tile of both halves of `gather_pair`, forward and backward; arguments as of `gather_tile`.

    Half a tile: a program may have the rows of two column groups, or the bins of its entries, in registers as well.
    """
    return gather_tile(width, num_reads, num_programs, _PER_THREAD // 2)


def split_length(num_tokens: int, num_reads: int) -> int:
    """Entries of a token that one program of `gather_pair` takes: all, unless few tokens would leave a GPU idle."""
    if num_tokens >= _FEW_PROGRAMS:
        return num_reads
    num_splits = -(-_FEW_PROGRAMS // max(1, num_tokens))
    return max(_MIN_SPLIT, _power_of_two(-(-num_reads // num_splits)))


def split_sum_tile(width: int) -> tuple[int, int]:
    """Columns and warps of a program that adds up the splits of a token: 16 bytes of fp32 per thread."""
    columns = min(256, columns_of(width))
    return columns, max(1, columns // (4 * _WARP))


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
