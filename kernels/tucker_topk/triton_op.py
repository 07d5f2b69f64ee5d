"""`tucker_topk` in Triton: the grid of candidates of a token and head lives in the registers of one program.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K retrieved,
WIDTH the power of two that holds M, Q the scratch row's capacity.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.ops import custom_op
from kernels.list_topk.triton_op import PADDING, collect_best, num_warps, ordered_key, select_in_two_stages
from kernels.tucker_topk.op import empty_result


@triton.jit
def _mixed(scores, core, s, present, stride_r, RANK: tl.constexpr):
    """sum_r scores[..., r] core[r, s] of the candidate rows at `scores`."""
    total = tl.load(scores, mask=present, other=0.0).to(tl.float32) * tl.load(core + s)
    for r in tl.static_range(1, RANK):
        score = tl.load(scores + r * stride_r, mask=present, other=0.0).to(tl.float32)
        total += score * tl.load(core + r * RANK + s)
    return total


@triton.jit
def collect_grid_kernel(
    row_scores,
    column_scores,
    core_sum,
    stage_ids,
    scratch,
    num_heads,
    stride_t,
    stride_h,
    stride_n,
    stride_r,
    ROW_TOP_K: tl.constexpr,
    TOP_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    THREADS: tl.constexpr,
    THREADS_ACROSS: tl.constexpr,
):
    """One program per (t, h): scores the M x M candidates, and writes the best K and some others into the scratch row.

    The threads form a grid of their own, THREADS_ACROSS wide, and each takes the candidates of several rows with
    several columns, so that it loads few of either.
    """
    program = tl.program_id(0)
    head = program % num_heads
    start = (program // num_heads).to(tl.int64) * stride_t + head.to(tl.int64) * stride_h
    core = core_sum + head * RANK * RANK
    thread = tl.arange(0, THREADS)[None, :]
    DOWN: tl.constexpr = THREADS // THREADS_ACROSS
    a = tl.arange(0, WIDTH // DOWN)[:, None] * DOWN + thread // THREADS_ACROSS
    b = tl.arange(0, WIDTH // THREADS_ACROSS)[:, None] * THREADS_ACROSS + thread % THREADS_ACROSS
    ids = stage_ids + program.to(tl.int64) * ROW_TOP_K
    side = tl.num_programs(0).to(tl.int64) * ROW_TOP_K
    rows = row_scores + start + tl.load(ids + a, mask=a < ROW_TOP_K, other=0) * stride_n
    columns = column_scores + start + tl.load(ids + side + b, mask=b < ROW_TOP_K, other=0) * stride_n
    column = tl.load(columns, mask=b < ROW_TOP_K, other=0.0).to(tl.float32)
    grid = _mixed(rows, core, 0, a < ROW_TOP_K, stride_r, RANK)[:, None, :] * column[None, :, :]
    for s in tl.static_range(1, RANK):
        column = tl.load(columns + s * stride_r, mask=b < ROW_TOP_K, other=0.0).to(tl.float32)
        grid += _mixed(rows, core, s, a < ROW_TOP_K, stride_r, RANK)[:, None, :] * column[None, :, :]
    keys = ordered_key(grid)
    if ROW_TOP_K < WIDTH:
        keys = tl.where((a < ROW_TOP_K)[:, None, :] & (b < ROW_TOP_K)[None, :, :], keys, PADDING)
    positions = (a * ROW_TOP_K)[:, None, :] + b[None, :, :]
    PER_THREAD: tl.constexpr = WIDTH * WIDTH // THREADS
    collect_best(
        tl.reshape(keys, [PER_THREAD, THREADS]),
        tl.reshape(positions, [PER_THREAD, THREADS]),
        scratch + program.to(tl.int64) * CAPACITY,
        TOP_K,
        CAPACITY,
    )


@custom_op("triton_tucker_topk", empty_result)
def tucker_topk(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """The function of `kernels.tucker_topk.naive.tucker_topk`, to the bit; raises as `select_in_two_stages` does."""
    width = max(16, triton.next_power_of_2(row_top_k))
    warps = num_warps(width**2)

    def collect(row_scores: Tensor, column_scores: Tensor, stage_ids: Tensor, scratch: Tensor) -> None:
        num_lists, row_capacity = scratch.shape
        _, num_heads, _, rank = row_scores.shape
        collect_grid_kernel[(num_lists,)](
            *(row_scores, column_scores, core_sum.contiguous(), stage_ids, scratch, num_heads, *row_scores.stride()),
            *(row_top_k, top_k, row_capacity, rank, width, 32 * warps, 16 if warps >= 4 else 8),
            num_warps=warps,
            # The twin rounds products and sums one by one.
            enable_fp_fusion=False,
        )

    directions = u.contiguous(), v.contiguous()
    return select_in_two_stages(
        row_scores, column_scores, directions, row_top_k, top_k, num_candidates=width**2, collect=collect
    )
