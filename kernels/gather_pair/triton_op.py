"""`gather_pair` in Triton: products and sums of a token's entries by one program, forward and backward.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: T tokens, J rows read per token, C column groups, P pre-value columns, V value columns, B bins, S splits.

As in split-K, the entries of a token are cut into splits of SPLIT entries, one per program. A program writes the
products of all its entries, and then sums the rows of the other table with them. Partial sums of several
splits go to scratch, and `sum_of_splits_kernel` adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.checks import check_contiguous
from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.tiles import pair_tile, split_length, split_sum_tile
from kernels.common.triton_rows import activated, activation_slope, products_of_rows, sum_of_rows
from kernels.gather_pair.operands import SCHEMA, Pair, PairGradients, PairOperands


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


@dataclass(frozen=True)
class Launch:
    """Cut of the entries of T tokens into programs."""

    split: int
    """Entries of a program."""
    num_splits: int
    """S."""
    constants: dict[str, Any]
    """Tiles and warps."""


def launch_of(tokens: int, reads: int, dot_width: int, sum_width: int) -> Launch:
    """For T tokens with J reads; widths of a column group of the first table read and of the second."""
    split = split_length(tokens, reads)
    num_splits = max(1, -(-reads // split))
    dot, sums = (pair_tile(width, split, tokens * num_splits) for width in (dot_width, sum_width))
    tiles = {
        "DOT_ENTRIES": dot.entries,
        "DOT_COLUMNS": dot.columns,
        "SUM_ENTRIES": sums.entries,
        "SUM_COLUMNS": sums.columns,
    }
    return Launch(split, num_splits, {**tiles, "num_warps": dot.num_warps})


def _empty_pair(*operands: Any) -> tuple[Tensor, Tensor]:
    """The result and the products, not filled yet; the products have the dtype of the kernel's sums."""
    o = PairOperands(*operands)
    out = o.values.new_empty(o.ids.shape[0], o.num_bins * o.values.shape[1])
    return out, o.values.new_empty(o.ids.shape, dtype=torch.promote_types(o.values.dtype, torch.float32))


@torch.library.custom_op("megamem::triton_gather_pair", mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)")
def _forward(*operands: Any) -> tuple[Tensor, Tensor]:
    o = PairOperands(*operands)
    check_contiguous(o.pre_values)
    check_contiguous(o.values)
    tokens, reads, groups = o.scores.shape
    pre_width, width = o.pre_values.shape[1], o.values.shape[1]
    out, products = _empty_pair(*o)
    if out.numel() == 0:
        return out, products
    launch = launch_of(tokens, reads, pre_width, width // groups)
    sums = _room_for_splits(out, launch, products.dtype)
    ids = o.ids.contiguous()
    with on_device_of(o.values):
        gather_pair_kernel[(tokens, launch.num_splits)](
            o.pre_values,
            o.values,
            ids,
            o.x.contiguous(),
            o.scores.contiguous(),
            ids if o.bins is None else o.bins.contiguous(),
            products,
            sums,
            reads,
            launch.split,
            **_constants(o, launch),
        )
    _add_splits(sums, out)
    return out, products


_forward.register_fake(_empty_pair)


def _empty_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """`PairGradients`, not filled yet; what only `segment_accumulate` reads is not rounded."""
    *operands, products, _ = arguments
    o = PairOperands(*operands)
    grad_x = o.pre_values.new_empty(o.ids.shape[0], o.pre_values.shape[1])
    return (
        o.scores.new_empty(o.scores.shape),
        products.new_empty(products.shape),
        products.new_empty(o.scores.shape),
        grad_x,
    )


@torch.library.custom_op(
    "megamem::triton_gather_pair_gradients",
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor products, Tensor grad_out) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _gradients(*arguments: Any) -> tuple[Tensor, ...]:
    *operands, products, grad_out = arguments
    o = PairOperands(*operands)
    tokens, reads, groups = o.scores.shape
    pre_width, width = o.pre_values.shape[1], o.values.shape[1]
    made = PairGradients(*_empty_gradients(*arguments))
    if made.x.numel() == 0:
        return tuple(made)
    launch = launch_of(tokens, reads, width // groups, pre_width)
    sums = _room_for_splits(made.x, launch, products.dtype)
    ids = o.ids.contiguous()
    with on_device_of(o.values):
        gather_pair_gradients_kernel[(tokens, launch.num_splits)](
            o.pre_values,
            o.values,
            ids,
            o.scores.contiguous(),
            products,
            grad_out.contiguous(),
            ids if o.bins is None else o.bins.contiguous(),
            made.scores,
            made.products,
            made.coef,
            sums,
            reads,
            launch.split,
            **_constants(o, launch),
        )
    _add_splits(sums, made.x)
    return tuple(made)


_gradients.register_fake(_empty_gradients)


gather_pair = Pair(
    lambda o: _forward(*o), lambda o, products, grad_out: PairGradients(*_gradients(*o, products, grad_out))
)
"""Products and coefficients are not rounded to the dtype of the tables."""


def _constants(o: PairOperands, launch: Launch) -> dict[str, Any]:
    return {
        "C": o.scores.shape[2],
        "P": o.pre_values.shape[1],
        "V": o.values.shape[1],
        "B": o.num_bins,
        "ACTIVATION": o.activation,
        "SUM": sum_dtype(o.values),
        **launch.constants,
    }


def _room_for_splits(out: Tensor, launch: Launch, dtype: torch.dtype) -> Tensor:
    """Destination of the kernel's sums: `out` [T, W], or with several splits scratch [T, S, W]."""
    return out if launch.num_splits == 1 else out.new_empty(out.shape[0], launch.num_splits, out.shape[1], dtype=dtype)


def _add_splits(splits: Tensor, out: Tensor) -> None:
    """Adds up the sums in scratch, if they are there."""
    if splits is out:
        return
    width = out.shape[1]
    columns, num_warps = split_sum_tile(width)
    with on_device_of(out):
        sum_of_splits_kernel[(out.shape[0], -(-width // columns))](
            splits, out, splits.shape[1], W=width, COLUMNS=columns, num_warps=num_warps
        )
