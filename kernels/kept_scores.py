"""The scores of kept entries, with a gradient whose bits do not depend on the run.

Legend: T tokens, H heads, N keys per side, R scores per key, K retrieved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def kept_scores(scores: Tensor, ids: Tensor) -> Tensor:
    """out[t, h, k] = scores[t, h, ids[t, h, k]], differentiable in `scores`.

    A key that is kept several times has a sum of gradients. PyTorch's backward of `gather` adds with atomics on GPUs,
    in an order that changes from run to run.

    Args:
        scores: [T, H, N, R].
        ids: [T, H, K], int64 in [0, N), which may repeat.

    Returns:
        [T, H, K, R].
    """
    out: Tensor = _KeptScores.apply(scores, ids)
    return out


def sum_by_id(gradient: Tensor, ids: Tensor, num_keys: int) -> Tensor:
    """The gradient of `kept_scores` in its scores [T, H, N, R], from that of its result [T, H, K, R].

    Entries are sorted by key before they are added, which needs no atomics.
    """
    num_lists, num_scores = ids.shape[0] * ids.shape[1], gradient.shape[3]
    first = torch.arange(num_lists, device=ids.device).view(*ids.shape[:2], 1) * num_keys
    total = gradient.new_zeros(num_lists * num_keys, num_scores)
    total.index_put_(((first + ids).flatten(),), gradient.flatten(0, 2), accumulate=True)
    return total.view(*ids.shape[:2], num_keys, num_scores)


class _KeptScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_keys = scores.shape[2]
        return scores.gather(2, _expanded(ids, scores.shape[3]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        (gradient,) = grads
        if gradient.is_cuda:
            return sum_by_id(gradient, ids, ctx.num_keys), None
        # In the order of the entries, and without the sort.
        shape = (*ids.shape[:2], ctx.num_keys, gradient.shape[3])
        return gradient.new_zeros(shape).scatter_add_(2, _expanded(ids, gradient.shape[3]), gradient), None


def _expanded(ids: Tensor, num_scores: int) -> Tensor:
    return ids.unsqueeze(3).expand(-1, -1, -1, num_scores)
