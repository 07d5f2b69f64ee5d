"""`gather_sum` in Triton.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: T tokens, J rows read per token, C column groups, W columns, B bins. A program makes some columns of a token's
sum.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.ops import custom_op
from kernels.common.tables import check_contiguous
from kernels.common.tiles import sum_tile
from kernels.gather_sum.op import empty_result


@triton.jit
def _sum_of_rows(
    table,
    ids,
    coef,
    bins,
    t,
    group,
    b,
    columns,
    in_row,
    start,
    num_rows,
    J,
    C: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ENTRIES: tl.constexpr,
    SUM: tl.constexpr,
):
    """Sum of coef[t, j, group] table[ids[t, j], columns of the group] over ENTRIES entries j of bin b from `start` on."""
    j = start + tl.arange(0, ENTRIES)
    present = j < J
    entry = t * J + j
    if B > 1:
        present = present & (tl.load(bins + entry, mask=present, other=-1) == b)
    row = tl.load(ids + entry, mask=present, other=-1)
    # Beside the ids and not behind them; what it is for rows that others hold does not count.
    scale = tl.load(coef + entry * C + group, mask=present, other=0).to(SUM)
    own = present & (row >= 0) & (row < num_rows)
    scale = tl.where(own, scale, 0)
    at = (row.to(tl.int64) * W + group * (W // C))[:, None] + columns[None, :]
    rows = tl.load(table + at, mask=own[:, None] & in_row[None, :], other=0).to(SUM)
    return tl.sum(scale[:, None] * rows, axis=0)


@triton.jit(do_not_specialize=["num_rows"])
def gather_sum_kernel(
    table,
    ids,
    coef,
    bins,
    out,
    num_rows,
    J,
    C: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    SUM: tl.constexpr,
):
    """out[t, b, group c] = sum_{j: bins[t, j] = b} coef[t, j, c] table[ids[t, j], group c].

    The grid is (T, B x C x column tiles). Every element of a tile has a sum of its own in registers; these are added up
    at the end. Of an entry whose row others hold, nothing of a table is loaded.
    """
    PER_GROUP: tl.constexpr = W // C
    COLUMN_TILES: tl.constexpr = (PER_GROUP + COLUMNS - 1) // COLUMNS
    t = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    group = tile // COLUMN_TILES % C
    b = tile // (COLUMN_TILES * C)
    columns = tile % COLUMN_TILES * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < PER_GROUP
    total = tl.zeros([COLUMNS], SUM)
    # Unrolled where the entries are few, so that the ids of later ones are under way with the rows of the first.
    if TILES <= 8:
        for step in tl.static_range(TILES):
            total += _sum_of_rows(
                table, ids, coef, bins, t, group, b, columns, in_row, step * ENTRIES, num_rows, J, C, W, B, ENTRIES, SUM
            )
    else:
        for start in range(0, J, ENTRIES):
            total += _sum_of_rows(
                table, ids, coef, bins, t, group, b, columns, in_row, start, num_rows, J, C, W, B, ENTRIES, SUM
            )
    total = total.to(out.dtype.element_ty)
    tl.store(out + (t * B + b) * W + group * PER_GROUP + columns, total, mask=in_row)


@custom_op("triton_gather_sum", empty_result)
def gather_sum(table: Tensor, ids: Tensor, coef: Tensor, bins: Tensor | None = None, num_bins: int = 1) -> Tensor:
    """The function of `kernels.gather_sum.naive.gather_sum`, without gradients."""
    check_contiguous(table)
    tokens, reads, groups = coef.shape
    num_rows, width = table.shape
    out = table.new_empty(tokens, num_bins * width)
    if out.numel():
        grid, constants, num_warps = _plan(tokens, reads, groups, width, num_bins, table.dtype)
        ids = ids.contiguous()
        bins = ids if bins is None else bins.contiguous()
        with on_device_of(table):
            gather_sum_kernel[grid](
                *(table, ids, coef.contiguous(), bins, out, num_rows, reads), *constants, num_warps=num_warps
            )
    return out


@cache
def _plan(
    tokens: int, reads: int, groups: int, width: int, num_bins: int, dtype: torch.dtype
) -> tuple[tuple[int, int], tuple[Any, ...], int]:
    """The grid, the kernel's constants, and its warps."""
    tile = sum_tile(width // groups, reads, tokens * groups * num_bins)
    grid = tokens, num_bins * groups * tile.column_tiles(width // groups)
    num_tiles = -(-reads // tile.entries)
    constants = (groups, width, num_bins, tile.entries, tile.columns, num_tiles, sum_dtype(dtype))
    return grid, constants, tile.num_warps
