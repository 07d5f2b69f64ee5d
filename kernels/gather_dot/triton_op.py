"""`gather_dot` in Triton.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: T tokens, J rows read per token, C column groups, W columns, B bins. A program makes some products of one token.
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
from kernels.common.tiles import gather_tile
from kernels.gather_dot.op import empty_result


@triton.jit(do_not_specialize=["num_rows"])
def gather_dot_kernel(
    table,
    ids,
    x,
    bins,
    out,
    num_rows,
    J,
    C: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    """out[t, j, c] = <table[ids[t, j], group c], x[t, bins[t, j], group c]>.

    The grid is (T, tiles of ENTRIES entries, C). Of an entry whose row others hold nothing but the id is loaded, and its
    product is zero.
    """
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    group = tl.program_id(2)
    present = j < J
    entry = t * J + j
    row = tl.load(ids + entry, mask=present, other=-1)
    own = (row >= 0) & (row < num_rows)
    row = row.to(tl.int64)
    b = row
    if B > 1:
        b = tl.load(bins + entry, mask=own, other=0)
    PER_GROUP: tl.constexpr = W // C
    products = tl.zeros([ENTRIES], SUM)
    # Unrolled, as a row is few tiles: a loop spills registers for capability 80 where a row is three.
    for start in tl.static_range(0, PER_GROUP, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        in_row = columns < PER_GROUP
        at = (row * W + group * PER_GROUP)[:, None] + columns[None, :]
        mask = own[:, None] & in_row[None, :]
        rows = tl.load(table + at, mask=mask, other=0).to(SUM)
        if B > 1:
            vector_at = ((t * B + b) * W + group * PER_GROUP)[:, None] + columns[None, :]
            products += tl.sum(rows * tl.load(x + vector_at, mask=mask, other=0).to(SUM), axis=1)
        else:
            vector = tl.load(x + t * W + group * PER_GROUP + columns, mask=in_row, other=0).to(SUM)
            products += tl.sum(rows * vector[None, :], axis=1)
    # A vector may hold what makes even a product with zero a NaN.
    products = tl.where(own, products, 0)
    tl.store(out + entry * C + group, products.to(out.dtype.element_ty), mask=present)


@custom_op("triton_gather_dot", empty_result)
def gather_dot(table: Tensor, ids: Tensor, x: Tensor, num_groups: int = 1, bins: Tensor | None = None) -> Tensor:
    """The function of `kernels.gather_dot.naive.gather_dot`, without gradients."""
    check_contiguous(table)
    tokens, reads = ids.shape
    num_rows, width = table.shape
    out = x.new_empty(tokens, reads, num_groups)
    if out.numel():
        num_bins = 1 if bins is None else x.shape[1] // width
        grid, constants, num_warps = _plan(tokens, reads, num_groups, width, num_bins, table.dtype)
        ids = ids.contiguous()
        bins = ids if bins is None else bins.contiguous()
        with on_device_of(table):
            gather_dot_kernel[grid](
                *(table, ids, x.contiguous(), bins, out, num_rows, reads), *constants, num_warps=num_warps
            )
    return out


@cache
def _plan(
    tokens: int, reads: int, groups: int, width: int, num_bins: int, dtype: torch.dtype
) -> tuple[tuple[int, int, int], tuple[Any, ...], int]:
    """The grid, the kernel's constants, and its warps."""
    tile = gather_tile(width // groups, reads, tokens * groups)
    constants = (groups, width, num_bins, tile.entries, tile.columns, sum_dtype(dtype))
    return (tokens, -(-reads // tile.entries), groups), constants, tile.num_warps
