"""`product_topk` in Triton, as a custom op of PyTorch: nothing waits for the device.

Legend: T tokens, H heads, N keys per side, M rows (and columns) kept by the first stage, K retrieved, S the power of
two that holds sqrt(K), WIDTH the one that holds M, Q the scratch row's capacity.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from kernels.list_topk.triton_launch import select_in_two_stages
from kernels.product_topk.op import empty_result
from kernels.product_topk.triton_kernel import collect_sums_kernel


@torch.library.custom_op("megamem::triton_product_topk", mutates_args=())
def product_topk(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The function of `kernels.product_topk.naive.product_topk`, to the bit; raises as `select_in_two_stages` does."""
    width = max(16, triton.next_power_of_2(row_top_k))
    strip = triton.next_power_of_2(math.isqrt(top_k))

    def collect(row_scores: Tensor, column_scores: Tensor, stage_ids: Tensor, scratch: Tensor) -> None:
        num_lists, row_capacity = scratch.shape
        collect_sums_kernel[(num_lists,)](
            row_scores,
            column_scores,
            stage_ids,
            scratch,
            row_scores.shape[1],
            *row_scores.stride(),
            ROW_TOP_K=row_top_k,
            TOP_K=top_k,
            CAPACITY=row_capacity,
            STRIP=strip,
            WIDTH=width,
            num_warps=max(1, width // 32),
        )

    return select_in_two_stages(
        row_scores, column_scores, None, row_top_k, top_k, num_candidates=2 * strip * width, collect=collect
    )


product_topk.register_fake(empty_result)
