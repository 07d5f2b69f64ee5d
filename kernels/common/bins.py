"""Entries that belong to different sums of one token: its bins, the virtual blocks of implicit value expansion.

Legend: T tokens, J rows read per token, C column groups, W columns, B bins.
"""

from __future__ import annotations

import torch
from torch import Tensor


def vectors_of_entries(x: Tensor, bins: Tensor, width: int) -> Tensor:
    """x[t, bins[t, j]] with x [T, B W] seen as [T, B, W]: [T, J, W]."""
    x = x.reshape(x.shape[0], -1, width)
    token = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x[token, bins]


def sort_by_bin(ids: Tensor, coef: Tensor, bins: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """A token's entries in the order of their bins, and where each bin starts.

    No shape depends on the data, so nothing waits for a device.

    Args:
        ids: [T, J].
        coef: [T, J, C].
        bins: [T, J], int64 in [0, B).
        num_bins: B.

    Returns:
        ids [T, J] and coef [T, J, C] reordered; the position [T, C, B] of each bin's first entry, counted over
        [T, C, J].
    """
    num_tokens, num_rows_read, num_groups = coef.shape
    bins, order = bins.sort(dim=1, stable=True)
    coef = coef.gather(1, order.unsqueeze(2).expand(-1, -1, num_groups))
    every = torch.arange(num_bins, device=ids.device).expand(num_tokens, -1).contiguous()
    before = torch.searchsorted(bins, every)
    first = torch.arange(num_tokens * num_groups, device=ids.device) * num_rows_read
    return ids.gather(1, order), coef, before.unsqueeze(1) + first.view(num_tokens, num_groups, 1)
