"""`gather_sum` in PyTorch: bags of `embedding_bag`.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns (C divides W), B blocks of entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.blocks import sort_by_block


def gather_sum(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None = None, num_blocks: int = 1) -> Tensor:
    """The function of `kernels.gather_sum.naive.gather_sum`, without gradients."""
    num_tokens, num_rows_read, num_groups = coef.shape
    starts = None
    if block is not None:
        ids, coef, starts = sort_by_block(ids, coef, block, num_blocks)
    # Column group c of row i is row i C + c of the table seen as [R C, W / C].
    group = torch.arange(num_groups, device=ids.device).view(1, num_groups, 1)
    group_ids = (ids.unsqueeze(1) * num_groups + group).reshape(num_tokens * num_groups, num_rows_read)
    weights = coef.transpose(1, 2).reshape(num_tokens * num_groups, num_rows_read)
    columns = table.view(table.shape[0] * num_groups, -1)
    if starts is None:
        return F.embedding_bag(group_ids, columns, per_sample_weights=weights, mode="sum").view(
            num_tokens, table.shape[1]
        )
    # One bag per (token, group, block), of whatever length.
    out = F.embedding_bag(
        group_ids.flatten(), columns, offsets=starts.flatten(), per_sample_weights=weights.flatten(), mode="sum"
    )
    return (
        out.view(num_tokens, num_groups, num_blocks, columns.shape[1])
        .transpose(1, 2)
        .reshape(num_tokens, num_blocks * table.shape[1])
    )
