"""`product_topk` in Triton: of the sums of two sorted lists, only those near their heads are computed.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: T tokens, H heads, N keys per side, M rows (and columns) kept by the first stage, K retrieved, S the power of
two that holds sqrt(K), WIDTH the one that holds M, Q the scratch row's capacity.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.ops import custom_op
from kernels.list_topk.triton_op import PADDING, collect_best, ordered_key, select_in_two_stages
from kernels.product_topk.op import empty_result


@triton.jit
def collect_sums_kernel(
    row_scores,
    column_scores,
    stage_ids,
    scratch,
    num_heads,
    stride_t,
    stride_h,
    stride_n,
    ROW_TOP_K: tl.constexpr,
    TOP_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    STRIP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per (t, h): of the candidates with (a + 1)(b + 1) <= K the best K and some others to scratch.

    The smaller of a + 1 and b + 1 is at most sqrt(K), so they lie in two strips: a < S with every b, and b < S with
    every other a. The tile holds one below the other: a line is a place below S, a column any other place.
    """
    program = tl.program_id(0)
    start = (program // num_heads).to(tl.int64) * stride_t + (program % num_heads).to(tl.int64) * stride_h
    ids = stage_ids + program.to(tl.int64) * ROW_TOP_K
    side = tl.num_programs(0).to(tl.int64) * ROW_TOP_K
    line = tl.arange(0, 2 * STRIP)[:, None]
    by_row = line < STRIP
    short = line % STRIP
    long = tl.arange(0, WIDTH)[None, :]
    row_scores += start
    column_scores += start
    # One score per line for the strip's S rows (or columns), one per thread for the others.
    short_id = tl.load(ids + short + tl.where(by_row, 0, side), mask=short < ROW_TOP_K, other=0)
    short_row = tl.load(row_scores + short_id * stride_n, mask=by_row & (short < ROW_TOP_K), other=0.0)
    short_column = tl.load(column_scores + short_id * stride_n, mask=(line >= STRIP) & (short < ROW_TOP_K), other=0.0)
    long_row = tl.load(row_scores + tl.load(ids + long, mask=long < ROW_TOP_K, other=0) * stride_n)
    long_column = tl.load(column_scores + tl.load(ids + side + long, mask=long < ROW_TOP_K, other=0) * stride_n)
    sums = tl.where(by_row, short_row, short_column) + tl.where(by_row, long_column, long_row)
    a = tl.where(by_row, short, long)
    b = tl.where(by_row, long, short)
    present = ((a + 1) * (b + 1) <= TOP_K) & (a < ROW_TOP_K) & (b < ROW_TOP_K) & (by_row | (a >= STRIP))
    keys = tl.where(present, ordered_key(sums), PADDING)
    collect_best(keys, a * ROW_TOP_K + b, scratch + program.to(tl.int64) * CAPACITY, TOP_K, CAPACITY)


@custom_op("triton_product_topk", empty_result)
def product_topk(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The function of `kernels.product_topk.naive.product_topk`, to the bit; raises as `select_in_two_stages` does."""
    width = max(16, triton.next_power_of_2(row_top_k))
    strip = triton.next_power_of_2(math.isqrt(top_k))

    def collect(row_scores: Tensor, column_scores: Tensor, stage_ids: Tensor, scratch: Tensor) -> None:
        num_lists, row_capacity = scratch.shape
        collect_sums_kernel[(num_lists,)](
            *(row_scores, column_scores, stage_ids, scratch, row_scores.shape[1], *row_scores.stride()),
            *(row_top_k, top_k, row_capacity, strip, width),
            num_warps=max(1, width // 32),
        )

    return select_in_two_stages(
        row_scores, column_scores, None, row_top_k, top_k, num_candidates=2 * strip * width, collect=collect
    )
