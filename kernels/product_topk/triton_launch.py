"""`product_topk` in Triton, as a custom op of PyTorch: nothing waits for the device.

Legend: T tokens, H heads, N keys per side, M rows (and columns) kept by the first stage, K retrieved, S the power of
two that holds sqrt(K), WIDTH the one that holds M, Q the scratch row's capacity.
"""

from __future__ import annotations

import math

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
    with_equal_strides,
)
from kernels.product_topk.op import empty_result
from kernels.product_topk.triton_kernel import collect_sums_kernel


@torch.library.custom_op("megamem::triton_product_topk", mutates_args=())
def product_topk(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The function of `kernels.product_topk.naive.product_topk`, to the bit.

    Raises:
        TypeError: for another dtype than fp32.
        ValueError: if M or K is out of range, or there are too many candidates for a program's registers.
    """
    with on_device_of(row_scores):
        return _product_topk(row_scores, column_scores, row_top_k, top_k)


product_topk.register_fake(empty_result)


def _product_topk(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, num_keys = row_scores.shape
    check_top_k(row_top_k, num_keys)
    check_top_k(top_k, row_top_k**2)
    width = max(16, triton.next_power_of_2(row_top_k))
    strip = triton.next_power_of_2(math.isqrt(top_k))
    check_supported(row_scores, 2 * strip * width, top_k)
    row_scores, column_scores = with_equal_strides(row_scores, column_scores)
    stage_ids = best_of_both_sides(row_scores, column_scores, None, row_top_k)
    if stage_ids.numel() == 0:
        return stage_ids, stage_ids.new_empty(2, num_tokens, num_heads, top_k)
    scratch = stage_ids.new_empty(num_tokens * num_heads, capacity(top_k))
    collect_sums_kernel[(num_tokens * num_heads,)](
        row_scores,
        column_scores,
        stage_ids,
        scratch,
        num_heads,
        *row_scores.stride(),
        ROW_TOP_K=row_top_k,
        TOP_K=top_k,
        CAPACITY=capacity(top_k),
        STRIP=strip,
        WIDTH=width,
        num_warps=max(1, width // 32),
    )
    return stage_ids, best_slots(scratch, stage_ids, top_k)
