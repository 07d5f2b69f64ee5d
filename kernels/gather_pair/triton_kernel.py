"""`gather_pair` in Triton: products and sums of a token's entries by one program, forward and backward.

Legend: T tokens, J rows read per token, C column groups, P pre-value columns, V value columns, B bins, S splits.

As in split-K, the entries of a token are cut into splits of SPLIT entries, one per program. A program writes the
products of all its entries, and then sums the rows of the other table with them. Partial sums of several
splits go to scratch, and `sum_of_splits_kernel` adds them up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.triton_rows import activated, activation_slope, products_of_rows, sum_of_rows


@triton.jit
def gather_pair_kernel(
    pre_values,
    values,
    ids,
    x,
    scores,
    bins,
    products,
    out,
    J,
    SPLIT,
    C: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DOT_ENTRIES: tl.constexpr,
    DOT_COLUMNS: tl.constexpr,
    SUM_ENTRIES: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    """The products, and the sums of each split.

        products[t, j] = <pre_values[ids[t, j]], x[t]>
        out[t, s, b, group c] =
            sum_{j of split s: bins[t, j] = b} scores[t, j, c] act(products[t, j]) values[ids[t, j], group c]

    The grid is (T, S).
    """
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SPLIT
    last = tl.minimum(first + SPLIT, J)
    for start in range(first, last, DOT_ENTRIES):
        j = start + tl.arange(0, DOT_ENTRIES)
        present = j < last
        row = tl.load(ids + t * J + j, mask=present, other=0)
        found = products_of_rows(pre_values, x, row, present, t, 0, 0, 1, P, 1, DOT_ENTRIES, DOT_COLUMNS, SUM)
        tl.store(products + t * J + j, found, mask=present)
    # The code below reads what other threads of this program have written.
    tl.debug_barrier()
    PER_GROUP: tl.constexpr = V // C
    COLUMN_TILES: tl.constexpr = (PER_GROUP + SUM_COLUMNS - 1) // SUM_COLUMNS
    out += (t * tl.num_programs(1) + tl.program_id(1)) * B * V
    for tile in range(B * C * COLUMN_TILES):
        group = tile // COLUMN_TILES % C
        b = tile // (COLUMN_TILES * C)
        columns = tile % COLUMN_TILES * SUM_COLUMNS + tl.arange(0, SUM_COLUMNS)
        in_row = columns < PER_GROUP
        total = sum_of_rows(
            values, ids, scores, products, bins, t, b, group, columns, in_row, first, last, J, C, V, B,
            ACTIVATION, SUM_ENTRIES, SUM_COLUMNS, SUM,
        )  # fmt: skip
        tl.store(out + b * V + group * PER_GROUP + columns, total.to(out.dtype.element_ty), mask=in_row)


@triton.jit
def gather_pair_gradients_kernel(
    pre_values,
    values,
    ids,
    scores,
    products,
    grad_out,
    bins,
    grad_scores,
    grad_products,
    coef,
    grad_x,
    J,
    SPLIT,
    C: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DOT_ENTRIES: tl.constexpr,
    DOT_COLUMNS: tl.constexpr,
    SUM_ENTRIES: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    """The coefficients coef[t, j, c] = scores[t, j, c] act(products[t, j]), and the gradients. With
    d[t, j, c] = <values[ids[t, j], group c], grad_out[t, bins[t, j], group c]>, the gradient of coef:

        grad_scores[t, j, c] = d[t, j, c] act(products[t, j])
        grad_products[t, j] = act'(products[t, j]) sum_c d[t, j, c] scores[t, j, c]
        grad_x[t, s] = sum_{j of split s} grad_products[t, j] pre_values[ids[t, j]]

    The grid is (T, S).
    """
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SPLIT
    last = tl.minimum(first + SPLIT, J)
    for start in range(first, last, DOT_ENTRIES):
        j = start + tl.arange(0, DOT_ENTRIES)
        present = j < last
        entry = t * J + j
        row = tl.load(ids + entry, mask=present, other=0)
        b = row
        if B > 1:
            b = tl.load(bins + entry, mask=present, other=0)
        product = tl.load(products + entry, mask=present, other=0)
        hidden = activated(product, ACTIVATION)
        grad_hidden = tl.zeros([DOT_ENTRIES], SUM)
        for group in range(C):
            score = tl.load(scores + entry * C + group, mask=present, other=0).to(SUM)
            grad_coef = products_of_rows(
                values, grad_out, row, present, t, b, group, C, V, B, DOT_ENTRIES, DOT_COLUMNS, SUM
            )
            grad_score = (grad_coef * hidden).to(grad_scores.dtype.element_ty)
            tl.store(grad_scores + entry * C + group, grad_score, mask=present)
            tl.store(coef + entry * C + group, score * hidden, mask=present)
            grad_hidden += grad_coef * score
        tl.store(grad_products + entry, grad_hidden * activation_slope(product, ACTIVATION), mask=present)
    # The code below reads what other threads of this program have written.
    tl.debug_barrier()
    grad_x += (t * tl.num_programs(1) + tl.program_id(1)) * P
    for start in range(0, P, SUM_COLUMNS):
        columns = start + tl.arange(0, SUM_COLUMNS)
        in_row = columns < P
        total = sum_of_rows(
            pre_values, ids, grad_products, products, bins, t, 0, 0, columns, in_row, first, last, J, 1, P, 1,
            None, SUM_ENTRIES, SUM_COLUMNS, SUM,
        )  # fmt: skip
        tl.store(grad_x + columns, total.to(grad_x.dtype.element_ty), mask=in_row)


@triton.jit
def sum_of_splits_kernel(splits, out, S, W: tl.constexpr, COLUMNS: tl.constexpr):
    """out[t, w] = sum_s splits[t, s, w], in the order of s; the grid is (T, column tiles)."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < W
    total = tl.zeros([COLUMNS], splits.dtype.element_ty)
    for s in range(S):
        total += tl.load(splits + (t * S + s) * W + columns, mask=in_row, other=0)
    tl.store(out + t * W + columns, total.to(out.dtype.element_ty), mask=in_row)
