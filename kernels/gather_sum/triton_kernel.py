"""`gather_sum` in Triton.

Legend: T tokens, J rows read per token, C column groups, W columns, B bins. A program makes some columns of a token's
sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.triton_rows import sum_of_rows


@triton.jit
def gather_sum_kernel(
    table,
    ids,
    coef,
    bins,
    out,
    J,
    C: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    """out[t, b, group c] = sum_{j: bins[t, j] = b} coef[t, j, c] table[ids[t, j], group c].

    The grid is (T, B x C x column tiles).
    """
    PER_GROUP: tl.constexpr = W // C
    COLUMN_TILES: tl.constexpr = (PER_GROUP + COLUMNS - 1) // COLUMNS
    t = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    group = tile // COLUMN_TILES % C
    b = tile // (COLUMN_TILES * C)
    columns = tile % COLUMN_TILES * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < PER_GROUP
    total = sum_of_rows(
        table, ids, coef, coef, bins, t, b, group, columns, in_row, 0, J, J, C, W, B, None, ENTRIES, COLUMNS, SUM
    )
    tl.store(out + (t * B + b) * W + group * PER_GROUP + columns, total.to(out.dtype.element_ty), mask=in_row)
