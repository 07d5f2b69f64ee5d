"""`row_update` in Triton: a program has a tile of rows and columns, and passes over rows that stay.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: R rows of a table, N rows of a gradient, W columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launch import on_device_of
from kernels.common.ops import custom_op
from kernels.common.rounding_triton import round_stochastically
from kernels.common.tiles import update_tile
from kernels.row_update.op import SCHEMA, from_custom_op


@triton.jit(do_not_specialize=["num_entries", "keep", "key", "first_row", "first_column"])
def row_update_kernel(
    weights,
    gradient,
    factors,
    rows,
    numbers,
    num_entries,
    keep,
    key,
    first_row,
    first_column,
    W: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    ROUND: tl.constexpr,
):
    """The grid is (tiles of ENTRIES rows of the gradient, column tiles)."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    factor = tl.load(factors + entry, mask=entry < num_entries, other=0)
    moves = entry < num_entries
    row = entry
    number = entry
    if OF_ROWS:
        moves = moves & (factor != 0)
        row = tl.load(rows + entry, mask=moves, other=0)
        number = tl.load(numbers + entry, mask=moves, other=0)
    else:
        moves = moves & ((factor != 0) | (keep != 1))
    moves = moves & (columns < W)
    held = tl.load(weights + row * W + columns, mask=moves, other=0)
    change = tl.load(gradient + entry * W + columns, mask=moves, other=0)
    updated = keep * held.to(tl.float32) + factor * change.to(tl.float32)
    if ROUND:
        updated = round_stochastically(updated, key, number + first_row, columns + first_column)
    tl.store(weights + row * W + columns, updated, mask=moves)


@custom_op("triton_row_update", mutates=("weights",), schema=SCHEMA)
def _row_update(
    weights: Tensor,
    gradient: Tensor,
    factors: Tensor,
    keep: float,
    rounding: list[int],
    rows: Tensor | None,
    numbers: Tensor | None,
) -> None:
    num, width = gradient.shape
    tile = update_tile(width)
    # What is not there stands for itself.
    of_rows = (factors, factors) if rows is None else (rows, rows if numbers is None else numbers)
    with on_device_of(weights):
        row_update_kernel[(-(-num // tile.entries), tile.column_tiles(width))](
            *(weights, gradient, factors, *of_rows, num, keep, *(rounding or (0, 0, 0))),
            *(width, tile.entries, tile.columns, rows is not None, bool(rounding)),
            num_warps=tile.num_warps,
            # Each product is rounded, as elsewhere.
            enable_fp_fusion=False,
        )


row_update = from_custom_op(_row_update)
"""The function of `kernels.row_update.naive.row_update`."""
