"""`gather_dot` in Triton.

Legend: T tokens, J rows read per token, C column groups, W columns, B bins. A program makes some products of one token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.triton_rows import products_of_rows


@triton.jit
def gather_dot_kernel(
    table,
    ids,
    x,
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
    """out[t, j, c] = <table[ids[t, j], group c], x[t, bins[t, j], group c]>.

    The grid is (T, tiles of ENTRIES entries, C).
    """
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    group = tl.program_id(2)
    present = j < J
    entry = t * J + j
    row = tl.load(ids + entry, mask=present, other=0)
    b = row
    if B > 1:
        b = tl.load(bins + entry, mask=present, other=0)
    products = products_of_rows(table, x, row, present, t, b, group, C, W, B, ENTRIES, COLUMNS, SUM)
    tl.store(out + entry * C + group, products.to(out.dtype.element_ty), mask=present)
