"""`gather_sum` in PyTorch: bags of `embedding_bag`.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.bins import sort_by_bin


def gather_sum(table: Tensor, ids: Tensor, coef: Tensor, bins: Tensor | None = None, num_bins: int = 1) -> Tensor:
    """The function of `kernels.gather_sum.naive.gather_sum`, without gradients."""
    num_tokens, num_rows_read, num_groups = coef.shape
    if bins is None:
        starts = torch.arange(num_tokens * num_groups, device=ids.device) * num_rows_read
    else:
        ids, coef, starts = sort_by_bin(ids, coef, bins, num_bins)
    # Column group c of row i is row i C + c of the table seen as [rows x C, W / C].
    group = torch.arange(num_groups, device=ids.device).view(1, num_groups, 1)
    group_ids = (ids.unsqueeze(1) * num_groups + group).flatten()
    weights = coef.transpose(1, 2).flatten()
    columns = table.view(table.shape[0] * num_groups, -1)
    # One bag per (token, group, bin), of any length.
    out = F.embedding_bag(group_ids, columns, offsets=starts.flatten(), per_sample_weights=weights, mode="sum")
    by_group = out.view(num_tokens, num_groups, num_bins, columns.shape[1])
    return by_group.transpose(1, 2).reshape(num_tokens, num_bins * table.shape[1])
