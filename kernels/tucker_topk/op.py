"""`tucker_topk`: its signature. It has no gradient: PyTorch differentiates the scores of what it selects."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


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


def empty_result(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """The result, not filled yet; also the ops' fake for `torch.compile`."""
    num_tokens, num_heads = row_scores.shape[:2]
    stage_ids = row_scores.new_empty(2, num_tokens, num_heads, row_top_k, dtype=torch.int64)
    return stage_ids, stage_ids.new_empty(2, num_tokens, num_heads, top_k)
