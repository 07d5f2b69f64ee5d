"""The forward pass of `gather_sum` in PyTorch, not differentiable: also the vector gradient of `gather_dot`.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns (C divides W).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_gather_sum(table: Tensor, ids: Tensor, coef: Tensor) -> Tensor:
    """out[t, group c] = sum_j coef[t, j, c] table[ids[t, j], group c], without a [T, J, W] temporary.

    Args:
        table: [R, W], contiguous.
        ids: [T, J], int64.
        coef: [T, J, C].

    Returns:
        [T, W].
    """
    num_tokens, num_rows_read, num_groups = coef.shape
    # Column group c of row i is row i C + c of the table seen as [R C, W / C].
    group = torch.arange(num_groups, device=ids.device).view(1, num_groups, 1)
    group_ids = ids.unsqueeze(1) * num_groups + group
    out = F.embedding_bag(
        group_ids.reshape(num_tokens * num_groups, num_rows_read),
        table.view(table.shape[0] * num_groups, -1),
        per_sample_weights=coef.transpose(1, 2).reshape(num_tokens * num_groups, num_rows_read),
        mode="sum",
    )
    return out.view(num_tokens, table.shape[1])
