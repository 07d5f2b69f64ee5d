"""`gather_sum` in Triton.

Legend: T tokens, J rows read per token, C column groups, W columns, B blocks of entries. A program makes one tile's columns of one token's
sum: rows are read once, and all elements of a tile are added up in registers before they are added together.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_sum_kernel(
    table,
    ids,
    coef,
    block,
    out,
    J,
    C: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    """out[t, b, group c] = sum_{j: block[t, j] = b} coef[t, j, c] table[ids[t, j], group c]; the grid is (T, B x C x column blocks)."""
    PER_GROUP: tl.constexpr = W // C
    COLUMN_BLOCKS: tl.constexpr = (PER_GROUP + COLUMNS - 1) // COLUMNS
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    group = part // COLUMN_BLOCKS % C
    b = part // (COLUMN_BLOCKS * C)
    columns = part % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < PER_GROUP
    sums = tl.zeros([ENTRIES, COLUMNS], SUM)
    for start in range(0, J, ENTRIES):
        j = start + tl.arange(0, ENTRIES)
        present = j < J
        entry = t * J + j
        if B > 1:
            present = present & (tl.load(block + entry, mask=present, other=-1) == b)
        row = tl.load(ids + entry, mask=present, other=0)
        scale = tl.load(coef + entry * C + group, mask=present, other=0).to(SUM)
        at = (row * W + group * PER_GROUP)[:, None] + columns[None, :]
        sums += scale[:, None] * tl.load(table + at, mask=present[:, None] & in_row[None, :], other=0).to(SUM)
    total = tl.sum(sums, axis=0).to(out.dtype.element_ty)
    tl.store(out + (t * B + b) * W + group * PER_GROUP + columns, total, mask=in_row)
