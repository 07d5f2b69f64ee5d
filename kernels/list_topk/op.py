"""`list_topk` in PyTorch. On CPU groups are selected first, then entries of the best; equal scores by distinct keys.

Legend: L lists, N entries of a list, K kept, S entries of a group.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.list_topk.naive import check_top_k

_LARGEST = 2**31 - 1


def torch_list_topk(scores: Tensor, top_k: int) -> Tensor:
    """The function of `kernels.list_topk.naive.list_topk`.

    `topk` leaves the order of equal scores undefined. So one entry more than asked for is selected: if all K + 1 scores
    differ, the selection is unique. Lists with equal scores, which products in bf16 nearly always have, are selected
    again by keys that all differ. To know whether there are any would mean to wait for a device, so devices sort.
    """
    num_entries = scores.shape[-1]
    check_top_k(top_k, num_entries)
    if scores.device.type != "cpu":
        return _first_of_sorted(scores, top_k)
    values, ids = _unordered_best(scores, min(top_k + 1, num_entries))
    # NaN, the first if it is there, is equal to NaN in our order, but not here.
    tied = (values[..., 1:] == values[..., :-1]).any(-1) | values[..., 0].isnan()
    ids = ids[..., :top_k]
    if not tied.any():
        return ids
    ids = ids.contiguous()
    ids[tied] = _best_of_tied(scores[tied], top_k)
    return ids


def _best_of_tied(scores: Tensor, top_k: int) -> Tensor:
    if scores.dtype == torch.float64:
        # No room for the position beside the score.
        return _first_of_sorted(scores, top_k)
    return _unordered_best(_distinct_keys(scores), top_k)[1]


def _first_of_sorted(scores: Tensor, top_k: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


def _distinct_keys(scores: Tensor) -> Tensor:
    """[..., N] int64 in the scores' order: a score's bits (flipped where negative) above the position from the end."""
    # -0 + 0 is 0.
    wide = scores.float() + 0.0
    bits = wide.view(torch.int32)
    keys = torch.where(wide.isnan(), _LARGEST, bits ^ ((bits >> 31) & _LARGEST))
    return (keys.long() << 32) + torch.arange(scores.shape[-1] - 1, -1, -1)


def _unordered_best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores [..., N] with their positions, in descending order, equal ones in any.

    They lie in the `count` groups with the largest maxima, because every other group has that many scores above its
    own. Groups of S = sqrt(N / count) leave 2 sqrt(N count) entries to select from.
    """
    num_entries = scores.shape[-1]
    group_size = math.isqrt(num_entries // count)
    if group_size < 2:
        values, ids = scores.topk(count, dim=-1)
        return values, ids
    num_groups = num_entries // group_size
    num_grouped = num_groups * group_size
    maxima = scores[..., :num_grouped].unflatten(-1, (group_size, num_groups)).amax(-2)
    groups = maxima.topk(count, dim=-1, sorted=False).indices
    members = torch.arange(0, num_grouped, num_groups).unsqueeze(1)
    left_over = torch.arange(num_grouped, num_entries).expand(*scores.shape[:-1], -1)
    ids = torch.cat([(groups.unsqueeze(-2) + members).flatten(-2), left_over], dim=-1)
    values, places = scores.gather(-1, ids).topk(count, dim=-1)
    return values, ids.gather(-1, places)
