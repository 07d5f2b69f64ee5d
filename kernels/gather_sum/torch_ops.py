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
    starts = None
    if bins is not None:
        ids, coef, starts = sort_by_bin(ids, coef, bins, num_bins)
    # Column group c of row i is row i C + c of the table seen as [rows x C, W / C].
    group = torch.arange(num_groups, device=ids.device).view(1, num_groups, 1)
    group_ids = (ids.unsqueeze(1) * num_groups + group).reshape(num_tokens * num_groups, num_rows_read)
    weights = coef.transpose(1, 2).reshape(num_tokens * num_groups, num_rows_read)
    columns = table.view(table.shape[0] * num_groups, -1)
    if starts is None:
        return F.embedding_bag(group_ids, columns, per_sample_weights=weights, mode="sum").view(
            num_tokens, table.shape[1]
        )
    # One bag per (token, group, bin), of any length.
    out = F.embedding_bag(
        group_ids.flatten(), columns, offsets=starts.flatten(), per_sample_weights=weights.flatten(), mode="sum"
    )
    return (
        out.view(num_tokens, num_groups, num_bins, columns.shape[1])
        .transpose(1, 2)
        .reshape(num_tokens, num_bins * table.shape[1])
    )
