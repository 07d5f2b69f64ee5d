"""The selections that retrieval is made of, by implementation.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from kernels.product_topk import naive as naive_product
from kernels.product_topk.op import product_topk_torch, product_topk_triton
from kernels.tucker_topk import naive as naive_tucker
from kernels.tucker_topk.op import tucker_topk_torch, tucker_topk_triton


class TuckerTopk(Protocol):
    """See `kernels.tucker_topk.naive.tucker_topk`. Not differentiable: to be called without gradients."""

    def __call__(
        self,
        row_scores: Tensor,
        column_scores: Tensor,
        core_sum: Tensor,
        u: Tensor,
        v: Tensor,
        row_top_k: int,
        top_k: int,
        /,
    ) -> tuple[Tensor, Tensor]: ...


class ProductTopk(Protocol):
    """See `kernels.product_topk.naive.product_topk`. Not differentiable: to be called without gradients."""

    def __call__(
        self, row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int, /
    ) -> tuple[Tensor, Tensor]: ...


TUCKER_TOPK: Mapping[str, TuckerTopk] = {
    "triton": tucker_topk_triton,
    "torch": tucker_topk_torch,
    "naive": naive_tucker.tucker_topk,
}
PRODUCT_TOPK: Mapping[str, ProductTopk] = {
    "triton": product_topk_triton,
    "torch": product_topk_torch,
    "naive": naive_product.product_topk,
}
