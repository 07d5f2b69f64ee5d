"""Building blocks of the gathers' Triton kernels: one program's products and weighted sums of a token's rows.

Legend: T tokens, J rows read per token, C column groups, W columns, B bins. A tile is ENTRIES rows and COLUMNS columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def products_of_rows(
    table,
    x,
    row,
    present,
    t,
    b,
    group,
    C: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    """<table[row], x[t, b]> in the columns of `group`: [ENTRIES], as `row`, `present` and, if B > 1, `b`."""
    PER_GROUP: tl.constexpr = W // C
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
    return products


@triton.jit
def sum_of_rows(
    table,
    ids,
    coef,
    products,
    bins,
    t,
    b,
    group,
    columns,
    in_row,
    first,
    last,
    J,
    C: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    """sum_{first <= j < last, bins[t, j] = b} coef[t, j, group] act(products[t, j]) table[ids[t, j]]: [COLUMNS].

    In `columns` of `group`. Without an ACTIVATION there are no products. Every element of a tile has a sum of its own
    in registers; these are added up at the end.
    """
    PER_GROUP: tl.constexpr = W // C
    sums = tl.zeros([ENTRIES, COLUMNS], SUM)
    for start in range(first, last, ENTRIES):
        j = start + tl.arange(0, ENTRIES)
        present = j < last
        entry = t * J + j
        if B > 1:
            present = present & (tl.load(bins + entry, mask=present, other=-1) == b)
        row = tl.load(ids + entry, mask=present, other=0)
        scale = tl.load(coef + entry * C + group, mask=present, other=0).to(SUM)
        if ACTIVATION is not None:
            scale *= activated(tl.load(products + entry, mask=present, other=0), ACTIVATION)
        at = (row * W + group * PER_GROUP)[:, None] + columns[None, :]
        sums += scale[:, None] * tl.load(table + at, mask=present[:, None] & in_row[None, :], other=0).to(SUM)
    return tl.sum(sums, axis=0)


@triton.jit
def activated(products, ACTIVATION: tl.constexpr):
    """act(products): themselves, or the exact gelu."""
    if ACTIVATION == "gelu":
        products = products * 0.5 * (1 + tl.erf(products * 0.7071067811865476))
    return products


@triton.jit
def activation_slope(products, ACTIVATION: tl.constexpr):
    """act'(products): one, or the normal distribution plus the products times its density."""
    slope = tl.full(products.shape, 1, products.dtype)
    if ACTIVATION == "gelu":
        slope = 0.5 * (1 + tl.erf(products * 0.7071067811865476))
        slope += products * tl.exp(-0.5 * products * products) * 0.3989422804014327
    return slope
