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


def kept_of_both(scores: Tensor, entries: Tensor) -> Tensor:
    """out[i, t, h, k] = scores[i, t, h, entries[i, t, h, k]] for both sides i, in at least fp32, as `kept_scores`.

    The gradient lies in memory as the scores do, in their dtype: sums are rounded once, and nothing is turned around
    on the way to the products that the scores are.

    Args:
        scores: [2, T, H, N, R].
        entries: [2, T, H, K], int64 in [0, N), which may repeat.

    Returns:
        [2, T, H, K, R].
    """
    out: Tensor = _KeptOfBoth.apply(scores, entries)
    return out


def sum_by_id(gradient: Tensor, ids: Tensor, num_keys: int) -> Tensor:
    """The gradient of `kept_scores` in its scores [T, H, N, R], from that of its result [T, H, K, R].

    Entries are sorted by key before they are added, which needs no atomics.
    """
    num_lists, num_scores = ids.shape[0] * ids.shape[1], gradient.shape[3]
    total = gradient.new_zeros(num_lists * num_keys, num_scores)
    _add_by_id(total, gradient, ids, num_keys)
    return total.view(*ids.shape[:2], num_keys, num_scores)


def sums_of_both(gradient: Tensor, entries: Tensor, num_keys: int) -> Tensor:
    """The gradient of `kept_of_both` [2, T, H, N, R] from that of its result, as `sum_by_id`."""
    total = gradient.new_zeros(*entries.shape[:3], num_keys, gradient.shape[4])
    for side, of_side, ids in zip(total, gradient, entries, strict=True):
        _add_by_id(side.flatten(0, 2), of_side, ids, num_keys)
    return total


def _add_by_id(total: Tensor, gradient: Tensor, ids: Tensor, num_keys: int) -> None:
    first = torch.arange(ids.shape[0] * ids.shape[1], device=ids.device).view(*ids.shape[:2], 1) * num_keys
    total.index_put_(((first + ids).flatten(),), gradient.flatten(0, 2), accumulate=True)


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


class _KeptOfBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, entries: Tensor) -> Tensor:
        ctx.save_for_backward(entries)
        ctx.shape, ctx.strides, ctx.dtype = scores.shape, scores.stride(), scores.dtype
        kept = scores.gather(3, entries.unsqueeze(4).expand(*entries.shape, scores.shape[4]))
        return kept.to(torch.promote_types(kept.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (entries,), (gradient,) = ctx.saved_tensors, grads
        if gradient.is_cuda:
            total = sums_of_both(gradient, entries, ctx.shape[3])
        else:
            # In the order of the entries, and without the sort.
            places = entries.unsqueeze(4).expand(*entries.shape, ctx.shape[4])
            total = gradient.new_zeros(ctx.shape).scatter_add_(3, places, gradient)
        out = gradient.new_empty_strided(ctx.shape, ctx.strides, dtype=ctx.dtype)
        return out.copy_(total), None


def _expanded(ids: Tensor, num_scores: int) -> Tensor:
    return ids.unsqueeze(3).expand(-1, -1, -1, num_scores)
