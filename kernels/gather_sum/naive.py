"""Reference of `gather_sum`: plain differentiable PyTorch, the oracle of every other implementation.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns (C divides W), B blocks of entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_sum(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None = None, num_blocks: int = 1) -> Tensor:
    """Weighted sums of table rows, with one coefficient per row and column group, and one sum per block of entries.

    out[t, b W + c W/C + d] = sum_{j: block[t, j] = b} coef[t, j, c] table[ids[t, j], c W/C + d]

    Args:
        table: [R, W], floating point.
        ids: [T, J], int64 in [0, R). Rows may repeat.
        coef: [T, J, C], the table's dtype.
        block: [T, J], int64 in [0, B): the sum that each entry belongs to. None: all belong to one.
        num_blocks: B; 1 without `block`.

    Returns:
        [T, B W], the table's dtype.
    """
    num_tokens, num_rows_read, num_groups = coef.shape
    if block is None:
        block = torch.zeros_like(ids)
    rows = table[ids].view(num_tokens, num_rows_read, num_groups, table.shape[1] // num_groups)
    member = F.one_hot(block, num_blocks).to(table.dtype)
    return torch.einsum("tjc,tjb,tjcd->tbcd", coef, member, rows).reshape(num_tokens, num_blocks * table.shape[1])
