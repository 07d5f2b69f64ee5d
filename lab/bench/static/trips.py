"""Iterations of the kernels' loops: in closed form, or on drawn data where they depend on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lab.bench.static.builds import Launch
from lab.bench.static.reads import Reads
from lab.bench.static.sass import SourceLoop
from lab.bench.static.warp import Trips
from pretrain.errors import UserError

_LISTS = 32
_PADDING = -(2**31)


def trips_of(launch: Launch, reads: Reads | None) -> Trips:
    """Iterations of each loop of a launched kernel.

    Raises (when asked for a loop that is not known):
        UserError: see above.
    """

    def trips(loop: SourceLoop | None) -> float:
        count = None if loop is None else _KNOWN.get((loop.function, loop.header))
        if count is None:
            raise UserError(
                f"{launch.name} has a loop of which nobody says how often it runs ({loop or 'of no line of ours'}): add "
                "it to lab/bench/static/trips.py"
            )
        return count(launch, reads)

    return trips


def _chunks_of_reads(launch: Launch, reads: Reads | None) -> float:
    return float(math.ceil(launch.values["J"] / launch.values["ENTRIES"]))


def _chunks_of_columns(launch: Launch, reads: Reads | None) -> float:
    values = launch.values
    return float(math.ceil(values["W"] // values["C"] / values["COLUMNS"]))


def _tiles_of_rows(launch: Launch, reads: Reads | None) -> float:
    """Tiles of a program."""
    values = launch.values
    return float(max(1.0, values["num_rows"] / values["ROWS"] / launch.grid[0]))


def _tiles_of_heads(launch: Launch, reads: Reads | None) -> float:
    """Tiles of query or key heads, of which a program goes through both by the same line."""
    values = launch.values
    rows = values["query_rows"] + values["key_rows"]
    return float(max(1.0, rows / 2 / values["ROWS"] / launch.grid[0]))


def _blocks_of_entries(launch: Launch, reads: Reads | None) -> float:
    return float(math.ceil(launch.values["K"] / launch.values["BLOCK"]))


def _steps_of_runs(launch: Launch, reads: Reads | None) -> float:
    assert reads is not None
    values = launch.values
    steps = _steps(reads, values["BLOCK"], values["slots_per_run"], values["RUNS"], values["AHEAD"])
    # Tiles of entries whose rows others hold see in one step that there is nothing to do.
    idle = max(0, launch.grid[0] - len(steps))
    return float((steps.sum() + idle) / (len(steps) + idle))


@lru_cache(maxsize=64)
def _steps(reads: Reads, block: int, num_slots: int, runs: int, ahead: int) -> NDArray[np.int64]:
    """Steps of each tile, which ends with its longest run; an entry more closes a run's last block."""
    lengths = reads.run_lengths(block, num_slots)
    longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), runs))
    return -(-(longest + 1) // ahead)


def _sums_of_blocks(launch: Launch, reads: Reads | None) -> float:
    """Were all of a tile's sums added one after the other, they would take so many."""
    assert reads is not None
    values = launch.values
    return _num_sums(reads, values["BLOCK"], values["before"], values["stride"]) / launch.grid[0]


@lru_cache(maxsize=64)
def _num_sums(reads: Reads, block: int, before: int, stride: int) -> int:
    """Sums of blocks at a level of `kernels.segment_accumulate`."""
    later = -(-reads.counts // block) - 1
    return int((-(-np.maximum(0, later - before) // stride)).sum())


def _bisections(launch: Launch, reads: Reads | None) -> float:
    values = launch.values
    if launch.name == "collect_lists_kernel":
        return _mean_bisections(
            values["num_keys"], values["ROWS"], values["WIDTH"], values["TOP_K"], values["CAPACITY"]
        )
    kept, top_k, capacity = values["ROW_TOP_K"], values["TOP_K"], values["CAPACITY"]
    if launch.name == "collect_grid_kernel":
        threads = values["THREADS"]
        return _mean_bisections(-kept, values["WIDTH"] ** 2 // threads, threads, top_k, capacity)
    return _mean_bisections(-kept, 2 * values["STRIP"], values["WIDTH"], top_k, capacity)


@lru_cache(maxsize=64)
def _mean_bisections(entries: int, rows: int, width: int, top_k: int, capacity: int) -> float:
    """Halvings until few enough entries of a tile reach the threshold (`kernels.list_topk.triton_op._above`).

    The entries are `entries` normal scores, or the sums of the best of two lists of -`entries` each.
    """
    generator = np.random.default_rng(0)
    counted = []
    for _ in range(_LISTS):
        if entries > 0:
            scores = generator.standard_normal(entries)
        else:
            sides = np.sort(generator.standard_normal((2, -40 * entries)))[:, entries:]
            scores = generator.permutation((sides[0][:, None] + sides[1][None, :]).ravel())
            # Of sums only those near the lists' heads are in the tile.
            scores = np.sort(scores)[::-1][: rows * width]
            generator.shuffle(scores)
        counted.append(_halvings(_ordered_keys(scores), rows, width, top_k, capacity))
    return float(np.mean(counted))


def _ordered_keys(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    bits = scores.astype(np.float32).view(np.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)


def _halvings(keys: NDArray[np.int64], rows: int, width: int, top_k: int, capacity: int) -> int:
    tile = np.full(rows * width, _PADDING, dtype=np.int64)
    tile[: len(keys)] = keys
    if rows * width < 2 * top_k:
        low = int(keys.min())
    else:
        split = 1 if top_k <= width else 1 << math.ceil(math.log2(math.ceil(top_k / width)))
        maxima = tile.reshape(rows // split, split * width).max(axis=0)
        used = maxima[maxima != _PADDING]
        low = int(used.min()) if len(used) >= top_k else _PADDING + 1
    high, count = int(keys.max()), int((keys >= low).sum())
    halvings = 0
    while count > capacity and low < high:
        middle = low + (high - low + 1) // 2
        reached = int((keys >= middle).sum())
        if reached >= top_k:
            low, count = middle, reached
        else:
            high = middle - 1
        halvings += 1
    return halvings


def _never(launch: Launch, reads: Reads | None) -> float:
    """Scores of normal numbers are all different."""
    return 0.0


_KNOWN: dict[tuple[str, str], Callable[[Launch, Reads | None], float]] = {
    (
        "rms_norm_gradients_kernel",
        "for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0))",
    ): _tiles_of_rows,
    ("_turn_back", "for tile in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0))"): _tiles_of_heads,
    ("sum_of_equal_keys_kernel", "for first in range(0, K, BLOCK)"): _blocks_of_entries,
    ("gather_sum_kernel", "for start in range(0, J, ENTRIES)"): _chunks_of_reads,
    ("gather_dot_kernel", "for start in range(0, PER_GROUP, COLUMNS)"): _chunks_of_columns,
    ("segment_accumulate_kernel", "for start in range(0, tl.max(length) + 1, AHEAD)"): _steps_of_runs,
    ("add_block_sums_kernel", "while (tl.max(going.to(tl.int32)) > 0) & (left > 0)"): _sums_of_blocks,
    ("_above", "while (num_above > CAPACITY) & (low < high)"): _bisections,
    ("_above", "while (num_above > CAPACITY) & (first < last)"): _never,
}
