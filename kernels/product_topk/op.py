"""`product_topk` as operators of PyTorch: what runs inside, and how it depends on the data, is hidden from tracing.

Legend: T tokens, H heads, N keys per side, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from kernels.product_topk import naive, selection


@torch.library.custom_op("megamem::product_topk_torch", mutates_args=())
def product_topk_torch(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The function of `kernels.product_topk.naive.product_topk` in PyTorch. On devices it is that function: nothing else there does
    without looking at the data, or defines the order of equal scores."""
    implementation = selection if row_scores.device.type == "cpu" else naive
    return implementation.product_topk(row_scores, column_scores, row_top_k, top_k)


@torch.library.custom_op("megamem::product_topk_triton", mutates_args=())
def product_topk_triton(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    """See `kernels.product_topk.triton_kernel.product_topk`."""
    from kernels.product_topk import triton_kernel

    # Triton launches on the current device.
    with torch.cuda.device(row_scores.device) if row_scores.is_cuda else nullcontext():
        return triton_kernel.product_topk(row_scores, column_scores, row_top_k, top_k)


@product_topk_torch.register_fake
@product_topk_triton.register_fake
def _shapes(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads = row_scores.shape[:2]
    stage_ids = row_scores.new_empty(2, num_tokens, num_heads, row_top_k, dtype=torch.int64)
    return stage_ids, stage_ids.new_empty(2, num_tokens, num_heads, top_k)
