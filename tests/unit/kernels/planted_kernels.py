"""Triton kernels with one defect each, for `tests.unit.kernels.kernel_builds`, and one without."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 32, 64


@triton.jit
def sound_kernel(table, ids, out, num_ids, W: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    mask = (entry < num_ids)[:, None] & (columns < W)[None, :]
    row = tl.load(ids + entry, mask=entry < num_ids, other=0)
    rows = tl.load(table + (row * W)[:, None] + columns[None, :], mask=mask, other=0)
    tl.store(out + (entry * W)[:, None] + columns[None, :], rows, mask=mask)


@triton.jit
def number_kernel(out, num_lists, K: tl.constexpr):
    """Asks a number for a method that Python's numbers, of which 1 is made one, do not have."""
    tl.store(out + num_lists.to(tl.int64) * K + tl.arange(0, 32), tl.program_id(0))


@triton.jit
def narrow_kernel(
    table, out, num_rows, width, W: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Multiplies with a width that the compiler does not know, and so cannot know how rows are aligned."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (columns < W)[None, :]
    rows = tl.load(table + (row * width)[:, None] + columns[None, :], mask=mask, other=0)
    tl.store(out + (row * W)[:, None] + columns[None, :], rows, mask=mask)


@triton.jit
def wrapping_kernel(
    table, ids, out, num_ids, W: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Multiplies rows of 32 bits with the width before anything is wider."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    mask = (entry < num_ids)[:, None] & (columns < W)[None, :]
    row = tl.load(ids + entry, mask=entry < num_ids, other=0)
    rows = tl.load(table + (row * W)[:, None] + columns[None, :], mask=mask, other=0)
    tl.store(out + (entry * W)[:, None].to(tl.int64) + columns[None, :], rows, mask=mask)


@triton.jit
def kept_kernel(table, out, W: tl.constexpr, C: tl.constexpr, ENTRIES: tl.constexpr):
    """Holds a tile from its first element's load to the last's store."""
    entries = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    held = tl.load(table + entries)
    tl.store(out + entries, held * tl.sum(held))


@triton.jit
def turned_kernel(table, out, SIZE: tl.constexpr):
    """Turns a tile through shared memory."""
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + places, tl.trans(tl.load(table + places)))


@triton.jit
def cutting_kernel(table, out, num_tiles, SIZE: tl.constexpr):
    """Adds products up as the compiler does, which has tensor cores do it."""
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    sums = tl.zeros([SIZE, SIZE], tl.float32)
    for tile in range(num_tiles):
        values = tl.load(table + tile.to(tl.int64) * (SIZE * SIZE) + places)
        sums += tl.dot(values, values, input_precision="tf32")
    tl.store(out + places, sums)


@triton.jit
def segment_accumulate_kernel(
    accumulator,
    vec,
    num_slots,
    W: tl.constexpr,
    C: tl.constexpr,
    RUNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Adds up what different threads have loaded, and stores it before the next entry is loaded."""
    rows, columns = tl.arange(0, RUNS)[:, None], tl.arange(0, COLUMNS)[None, :]
    for slot in range(num_slots):
        terms = tl.load(vec + (slot.to(tl.int64) * RUNS + rows) * W + columns)
        tl.store(accumulator + slot.to(tl.int64) * W + tl.arange(0, COLUMNS), tl.sum(terms, axis=0))


def planted() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Parts of messages that shall be found, with the call that launches."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    ids, narrow_ids = empty(1 << 26, dtype=torch.int64), empty(1 << 26, dtype=torch.int32)
    table, out = empty(1 << 20, 60), empty(1 << 26, 60)
    tile = {"W": 60, "C": 1, "ROWS": ROWS, "COLUMNS": COLUMNS}
    grid, numbers = ((1 << 26) // ROWS,), empty(64, dtype=torch.int64)
    wide = empty(1 << 20, dtype=torch.float32)
    yield (), partial(sound_kernel[grid], table, ids, out, 1 << 26, **tile)
    yield ("has no attribute 'to'",), partial(number_kernel[(4,)], numbers, 1, K=32)
    yield ("loads rows 2 bytes at a time, of 8",), partial(narrow_kernel[grid], table, out, 1 << 26, 60, **tile)
    yield (
        ("can reach 128,849,018,820, in 32 bits",),
        partial(wrapping_kernel[grid], table, narrow_ids, out, 1 << 26, **tile),
    )
    kept = {"C": 1, "num_warps": 1}
    yield ("a thread spills",), partial(kept_kernel[(4,)], wide, wide, W=8192, ENTRIES=8192, **kept)
    yield ("registers, of 102",), partial(kept_kernel[(4,)], wide, wide, W=4096, ENTRIES=4096, **kept)
    yield ("bytes of shared memory, of",), partial(turned_kernel[(1,)], wide, wide, SIZE=128)
    yield ("tensor cores add products",), partial(cutting_kernel[(1,)], wide, wide, 1 << 10, SIZE=16)
    sums = {"W": 64, "C": 1, "RUNS": 8, "COLUMNS": 64, "AHEAD": 4, "ROUND": False}
    waits = ("wait for each other in its loop: BAR", "1 loads, of 20, and 1 stores, of 4", "and plans count 31.2")
    yield waits, partial(segment_accumulate_kernel[(4,)], wide, wide, 1 << 10, **sums)
