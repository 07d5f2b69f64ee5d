"""Tiles of the Triton kernels: the rows and columns that a program has in registers.

Tile sizes are a closed form of widths and counts, so that all ranks launch the same kernels. Nothing is timed at run
time. Autotuning would have to be bounded, cached and agreed on between ranks, and the kernels wait for memory: what
matters is how wide the loads are, and how many are under way at once.

Imports neither Triton nor torch: plans count with these tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Elements of a tile that one thread holds in registers: 32 sums in fp32, and the loads that feed them.
_PER_THREAD = 32
_WARP = 32
_MAX_COLUMNS = 1024
# Fewer programs than a GPU can keep in flight: then each takes more entries at once.
_FEW_PROGRAMS = 256
# Logits of a row that a program has at once, and a thread of them: two loads of 16 bytes in bf16 are under way.
_MAX_LOGITS = 4096
_LOGITS_PER_THREAD = 16
# Programs of one warp that fill a GPU.
_MANY_PROGRAMS = 4096
# Columns that a run's threads have at once, and runs that keep a GPU busy.
_MAX_RUN_COLUMNS = 256
_MANY_RUNS = 1 << 14
# Programs of four warps that an H100 has room for, of threads with 96 registers.
_GAIN_PROGRAMS = 132 * 5
# Programs of `normal_product` that an H100 has room for: three on each of its multiprocessors. They are split for four rounds at
# most, and not below so many tiles that each goes over.
_PRODUCT_PROGRAMS = 3 * 132
_PRODUCT_ROUNDS = 4
_PRODUCT_STEPS = 8

MAX_NORM_COLUMNS = 8192
"""Columns of a row that a program of `rms_norm` holds."""
MAX_PRODUCT_OUTPUTS = 64
"""Products of a token that a program of `normal_product` holds."""
ACCUMULATE_AHEAD = 4
"""Entries of a run of `segment_accumulate` whose loads are under way at once."""
_ACCUMULATE_STEP = 250
"""Instructions of a warp for so many entries of each of its runs: 212 to 279 in the machine code
(`tests/unit/kernels/test_kernel_builds.py`)."""
_ROUNDED_STEP = 570
"""Instructions of a warp for as many entries where sums are rounded to bf16: 434 to 600."""


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
    """Tile of `gather_dot`.

    Args:
        width: columns of a column group.
        num_reads: J.
        num_programs: number of programs, if each has one token and column group.
    """
    columns = columns_of(width)
    num_warps = 8 if num_programs < _FEW_PROGRAMS else 4
    entries = max(1, num_warps * _WARP * _PER_THREAD // columns)
    return Tile(min(entries, _power_of_two(num_reads)), columns, num_warps)


def sum_tile(width: int, num_reads: int, num_programs: int) -> Tile:
    """Tile of `gather_sum`, whose arguments are those of `gather_tile`.

    A warp alone has a token where there are many: a sum over warps would pass through shared memory, with four barriers,
    for as many instructions as the loads take.
    """
    if num_programs < _MANY_PROGRAMS:
        return gather_tile(width, num_reads, num_programs)
    columns = min(columns_of(width), _MAX_RUN_COLUMNS)
    return Tile(min(_WARP * _PER_THREAD // columns, _power_of_two(num_reads)), columns, 1)


def accumulate_tile(width: int) -> Tile:
    """Tile of `segment_accumulate`: runs of entries, and the columns of each, of which a thread has four, or as many as
    are aligned.

    Rows are read whole where they can be, though more of a tile is masked then: every tile of columns reads the entries
    anew.
    """
    columns = min(_power_of_two(max(4, width)), _MAX_RUN_COLUMNS)
    if width > columns:
        columns = min(columns_of(width), _MAX_RUN_COLUMNS)
    threads = columns // math.gcd(width, 4)
    return Tile(max(1, _WARP // threads), columns, max(1, threads // _WARP))


def accumulate_instructions(width: int, *, rounded: bool = False) -> float:
    """Instructions of warps that `segment_accumulate` issues per entry, for a column group of this width."""
    tile, step = accumulate_tile(width), _ROUNDED_STEP if rounded else _ACCUMULATE_STEP
    return step * tile.num_warps * tile.column_tiles(width) / (ACCUMULATE_AHEAD * tile.entries)


def update_tile(width: int) -> Tile:
    """Tile of `row_update`: rows of a gradient, eight elements of each per thread, or as many as are aligned."""
    columns = columns_of(width)
    return Tile(max(1, 4 * _WARP * 8 // columns), columns, 4)


@dataclass(frozen=True)
class ListTile:
    """Lists of kept entries that one program has in registers."""

    lists: int
    entries: int
    """A power of two, of which a list fills a part."""
    num_warps: int


def list_tile(top_k: int) -> ListTile:
    """Tile of passes over lists of K kept entries: 512 of them, or one list."""
    entries = max(4, _power_of_two(top_k))
    return ListTile(max(1, 512 // entries), entries, 4)


def logits_tile(num_ids: int) -> Tile:
    """Tile of `softmax_sums` and `softmax_gradient`: a part of one row of logits, over which a program goes on."""
    columns = max(_WARP, min(_MAX_LOGITS, _power_of_two(num_ids)))
    return Tile(1, columns, max(1, columns // (_WARP * _LOGITS_PER_THREAD)))


@dataclass(frozen=True)
class HeadsTile:
    """Heads of tokens that one program of `rotated_heads` has in registers."""

    rows: int
    """Heads, a power of two."""
    half: int
    """Columns of each of the two halves that turn, a power of two; what is past their end is masked."""
    rest: int
    """Columns that do not turn, likewise; 0: there are none."""
    num_warps: int


def heads_tile(width: int, turning: int) -> HeadsTile:
    """Tile of `rotated_heads`: sixteen elements of heads per thread, which is 16 bytes of each half in bf16.

    Args:
        width: columns of a head.
        turning: columns of it that turn.
    """
    half = _power_of_two(turning // 2)
    rest = _power_of_two(width - turning) if width > turning else 0
    return HeadsTile(max(1, 4 * _WARP * 16 // _power_of_two(2 * half + rest)), half, rest, 4)


def norm_tile(width: int) -> Tile:
    """Tile of `rms_norm`: whole rows, sixteen elements of them per thread.

    Args:
        width: columns of a row, at most `MAX_NORM_COLUMNS`.
    """
    columns = _power_of_two(width)
    num_warps = min(16, max(4, columns // (_WARP * 16)))
    return Tile(max(1, num_warps * _WARP * 16 // columns), columns, num_warps)


@dataclass(frozen=True)
class MatricesTile:
    """Square matrices that one program of `doubly_stochastic` has in registers."""

    matrices: int
    """A power of two."""
    side: int
    """Rows and columns of each, a power of two; what is past the matrix's end is masked."""
    num_warps: int


def matrices_tile(n: int) -> MatricesTile:
    """Tile of `doubly_stochastic`: four numbers per thread, which are a row of n = 4.

    A warp alone is a program: steps wait for one another, and so matrices are spread over as many warps as they fill.
    """
    side = _power_of_two(n)
    return MatricesTile(max(1, _WARP * 4 // side**2), side, 1)


@dataclass(frozen=True)
class StreamsTile:
    """Columns of all residual streams of a token that one program has in registers."""

    columns: int
    """A power of two; what is past the streams' end is masked."""
    side: int
    """Streams, a power of two, likewise."""
    per_lane: int
    """Columns that one load of a thread brings."""
    num_warps: int

    @property
    def lanes(self) -> int:
        return self.columns // self.per_lane


def streams_tile(width: int, n: int, itemsize: int) -> StreamsTile:
    """Tile of passes over residual streams: 16 bytes of each per thread.

    Args:
        width: D, columns of a stream.
        n: streams.
        itemsize: bytes of a number.
    """
    return _streams_tile(width, n, 16 // itemsize)


def mixing_tile(width: int, n: int, itemsize: int) -> StreamsTile:
    """Tile of the backward pass of `mix_streams`, where a thread has at most 32 numbers of all streams, beside n^2 sums.

    Arguments as of `streams_tile`.
    """
    return _streams_tile(width, n, min(16 // itemsize, 32 // _power_of_two(n)))


def _streams_tile(width: int, n: int, per_lane: int) -> StreamsTile:
    columns = columns_of(width)
    per_lane = max(1, min(columns, per_lane))
    return StreamsTile(columns, _power_of_two(n), per_lane, min(16, max(1, columns // (_WARP * per_lane))))


@dataclass(frozen=True)
class ProductTile:
    """Tokens and columns that one program of `normal_product` has at once."""

    rows: int
    """Tokens, a power of two; what is past their end is masked."""
    columns: int
    """Likewise."""
    side: int
    """Outputs, likewise."""
    num_stages: int
    """Tiles of the loop that are under way at once."""

    @property
    def options(self) -> dict[str, int]:
        """Options of a launch. Four warps multiply 64 rows of one operand at once."""
        return {"num_warps": 4, "num_stages": self.num_stages}


def product_tile(num_outputs: int, *, narrow: bool) -> ProductTile:
    """Tile of `normal_product`: 128 bytes of each of 64 tokens, or half of it beside many outputs.

    Args:
        num_outputs: M, at most `MAX_PRODUCT_OUTPUTS`.
        narrow: numbers of x have no more digits than tensor cores multiply at once; others are multiplied in two parts.
    """
    side = max(16, _power_of_two(num_outputs))
    return ProductTile(64, 64 if narrow and side <= 32 else 32, side, 3 if side == 16 else 2)


def product_gradients_tile(num_outputs: int, *, narrow: bool) -> ProductTile:
    """Tile of the backward pass of `normal_product`: 64 columns, as they are the rows of a product there.

    Arguments as of `product_tile`.
    """
    tile = product_tile(num_outputs, narrow=narrow)
    return replace(tile, rows=tile.columns if tile.side <= 32 else 16, columns=64)


def product_splits(num_tiles: int, num_steps: int) -> int:
    """Parts of a loop over `num_steps` tiles, each of which is a program of its own: the fewest that nearly fill a GPU, or else
    those that best do.

    Args:
        num_tiles: programs, if none of them is split.
    """
    num_tiles = max(1, num_tiles)
    most = min(_PRODUCT_ROUNDS * _PRODUCT_PROGRAMS // num_tiles, num_steps // _PRODUCT_STEPS)

    def filled(splits: int) -> float:
        rounds = splits * num_tiles / _PRODUCT_PROGRAMS
        return min(0.9, rounds / math.ceil(rounds))

    return max(range(1, max(1, most) + 1), key=filled)


def gain_programs(num_tiles: int) -> int:
    """Programs that share tiles of rows and add up a gradient for each column: as many as fit on a GPU at a time."""
    return min(num_tiles, _GAIN_PROGRAMS)


def slots_per_run(num_slots: int) -> int:
    """Slots of entries in a run of `segment_accumulate`. Longer runs are more alike; short ones keep a GPU busy."""
    return min(4, max(1, num_slots // _MANY_RUNS))


def scratch_capacity(top_k: int) -> int:
    """Q of the selections: a power of two with room for a quarter more than K, so that the bisection has something to hit."""
    return max(16, _power_of_two(top_k + top_k // 4))


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
