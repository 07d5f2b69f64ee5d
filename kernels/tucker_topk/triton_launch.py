"""`tucker_topk` in Triton, as a custom op of PyTorch: nothing waits for the device.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K retrieved,
WIDTH the power of two that holds M, Q the scratch row's capacity.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.common.checks import check_top_k
from kernels.common.launch import on_device_of
from kernels.list_topk.triton_launch import (
    best_of_both_sides,
    best_slots,
    capacity,
    check_supported,
    num_warps,
    with_equal_strides,
)
from kernels.tucker_topk.op import empty_result
from kernels.tucker_topk.triton_kernel import collect_grid_kernel


@torch.library.custom_op("megamem::triton_tucker_topk", mutates_args=())
def tucker_topk(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """The function of `kernels.tucker_topk.naive.tucker_topk`, to the bit.

    Raises:
        TypeError: for another dtype than fp32.
        ValueError: if M or K is out of range, or the grid is too large for a program's registers.
    """
    with on_device_of(row_scores):
        return _tucker_topk(row_scores, column_scores, core_sum, u, v, row_top_k, top_k)


tucker_topk.register_fake(empty_result)


def _tucker_topk(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, num_keys, rank = row_scores.shape
    check_top_k(row_top_k, num_keys)
    check_top_k(top_k, row_top_k**2)
    width = max(16, triton.next_power_of_2(row_top_k))
    check_supported(row_scores, width**2, top_k)
    warps = num_warps(width**2)
    row_scores, column_scores = with_equal_strides(row_scores, column_scores)
    stage_ids = best_of_both_sides(row_scores, column_scores, (u, v), row_top_k)
    if stage_ids.numel() == 0:
        return stage_ids, stage_ids.new_empty(2, num_tokens, num_heads, top_k)
    scratch = stage_ids.new_empty(num_tokens * num_heads, capacity(top_k))
    collect_grid_kernel[(num_tokens * num_heads,)](
        row_scores,
        column_scores,
        core_sum.contiguous(),
        stage_ids,
        scratch,
        num_heads,
        *row_scores.stride(),
        ROW_TOP_K=row_top_k,
        TOP_K=top_k,
        CAPACITY=capacity(top_k),
        RANK=rank,
        WIDTH=width,
        THREADS=32 * warps,
        THREADS_ACROSS=16 if warps >= 4 else 8,
        num_warps=warps,
        # The twin rounds products and sums one by one.
        enable_fp_fusion=False,
    )
    return stage_ids, best_slots(scratch, stage_ids, top_k)
