"""`tucker_topk` in Triton, as a custom op of PyTorch: nothing waits for the device.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K retrieved,
WIDTH the power of two that holds M, Q the scratch row's capacity.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.list_topk.triton_launch import num_warps, select_in_two_stages
from kernels.tucker_topk.op import empty_result
from kernels.tucker_topk.triton_kernel import collect_grid_kernel


@torch.library.custom_op("megamem::triton_tucker_topk", mutates_args=())
def tucker_topk(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """The function of `kernels.tucker_topk.naive.tucker_topk`, to the bit; raises as `select_in_two_stages` does."""
    width = max(16, triton.next_power_of_2(row_top_k))
    warps = num_warps(width**2)

    def collect(row_scores: Tensor, column_scores: Tensor, stage_ids: Tensor, scratch: Tensor) -> None:
        num_lists, row_capacity = scratch.shape
        collect_grid_kernel[(num_lists,)](
            row_scores,
            column_scores,
            core_sum.contiguous(),
            stage_ids,
            scratch,
            row_scores.shape[1],
            *row_scores.stride(),
            ROW_TOP_K=row_top_k,
            TOP_K=top_k,
            CAPACITY=row_capacity,
            RANK=row_scores.shape[3],
            WIDTH=width,
            THREADS=32 * warps,
            THREADS_ACROSS=16 if warps >= 4 else 8,
            num_warps=warps,
            # The twin rounds products and sums one by one.
            enable_fp_fusion=False,
        )

    directions = u.contiguous(), v.contiguous()
    return select_in_two_stages(
        row_scores, column_scores, directions, row_top_k, top_k, num_candidates=width**2, collect=collect
    )


tucker_topk.register_fake(empty_result)
