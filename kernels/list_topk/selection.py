"""`list_topk` in PyTorch on CPU: its selection among groups, then inside the best of them, and a repair of the lists with equal scores.

Legend: L lists, N entries of a list, K kept, S entries of a group.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.list_topk import naive


def list_topk(scores: Tensor, top_k: int) -> Tensor:
    """The function of `kernels.list_topk.naive.list_topk`.

    `topk` leaves the order of equal scores undefined. So one entry more than asked for is selected: if all K + 1 scores differ, the
    selection is unique. Whether there are lists with equal scores decides what runs, so this is not for devices.
    """
    num_entries = scores.shape[-1]
    naive.check_top_k(top_k, num_entries)
    values, ids = _unordered_best(scores, min(top_k + 1, num_entries))
    equal, has_nan = values[..., 1:] == values[..., :-1], values[..., 0].isnan()
    ids = ids[..., :top_k]
    if not (equal.any() or has_nan.any()):
        return ids
    # Equal scores at the border decide which entries are kept, those inside only their order. NaN, the first if it is there, is equal to
    # NaN in our order, but not here.
    at_border = has_nan | equal[..., -1] if num_entries > top_k else has_nan
    inside = equal[..., : top_k - 1].any(-1) & ~at_border
    ids = ids.contiguous()
    ids[inside] = _reordered(scores[inside], ids[inside])
    ids[at_border] = naive.list_topk(scores[at_border], top_k)
    return ids


def _unordered_best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores [..., N] with their positions, in descending order, equal ones in any.

    They lie in the `count` groups with the largest maxima, because every other group has that many scores above its own. Groups of
    S = sqrt(N / count) leave 2 sqrt(N count) entries to select from.
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


def _reordered(scores: Tensor, ids: Tensor) -> Tensor:
    """The kept entries `ids` [L, K] of the lists `scores` [L, N], by score and then by position."""
    ascending = ids.sort(dim=-1).values
    order = scores.gather(1, ascending).sort(dim=-1, descending=True, stable=True).indices
    return torch.gather(ascending, 1, order)
