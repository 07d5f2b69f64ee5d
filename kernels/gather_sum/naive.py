"""Reference of `gather_sum`: plain differentiable PyTorch, the oracle of every other implementation.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns (C divides W).
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_sum(table: Tensor, ids: Tensor, coef: Tensor) -> Tensor:
    """Weighted sum of table rows, with one coefficient per row and column group.

    out[t, c W/C + d] = sum_j coef[t, j, c] table[ids[t, j], c W/C + d]

    Args:
        table: [R, W], floating point.
        ids: [T, J], int64 in [0, R). Rows may repeat.
        coef: [T, J, C], the table's dtype.

    Returns:
        [T, W], the table's dtype.
    """
    num_tokens, num_rows_read, num_groups = coef.shape
    rows = table[ids].view(num_tokens, num_rows_read, num_groups, table.shape[1] // num_groups)
    return torch.einsum("tjc,tjcd->tcd", coef, rows).reshape(num_tokens, table.shape[1])
