"""`gather_dot` in Triton.

Legend: T tokens, J rows read per token, C column groups, W columns, B blocks of entries. A program makes the products of some entries of one
token, tile by tile along the row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_dot_kernel(
    table,
    ids,
    x,
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
    """out[t, j, c] = <table[ids[t, j], group c], x[t, block[t, j], group c]>; the grid is (T, blocks of ENTRIES entries, C)."""
    PER_GROUP: tl.constexpr = W // C
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    group = tl.program_id(2)
    present = j < J
    entry = t * J + j
    row = tl.load(ids + entry, mask=present, other=0)
    if B > 1:
        b = tl.load(block + entry, mask=present, other=0)
    products = tl.zeros([ENTRIES], SUM)
    for start in range(0, PER_GROUP, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        in_row = columns < PER_GROUP
        at = (row * W + group * PER_GROUP)[:, None] + columns[None, :]
        mask = present[:, None] & in_row[None, :]
        rows = tl.load(table + at, mask=mask, other=0).to(SUM)
        if B > 1:
            vector_at = ((t * B + b) * W + group * PER_GROUP)[:, None] + columns[None, :]
            products += tl.sum(rows * tl.load(x + vector_at, mask=mask, other=0).to(SUM), axis=1)
        else:
            vector = tl.load(x + t * W + group * PER_GROUP + columns, mask=in_row, other=0).to(SUM)
            products += tl.sum(rows * vector[None, :], axis=1)
    tl.store(out + entry * C + group, products.to(out.dtype.element_ty), mask=present)
