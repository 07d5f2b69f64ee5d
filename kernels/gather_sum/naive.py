"""Reference of `gather_sum`: plain differentiable PyTorch, the oracle of every other implementation.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_sum(table: Tensor, ids: Tensor, coef: Tensor, bins: Tensor | None = None, num_bins: int = 1) -> Tensor:
    """Weighted sums of table rows, with one coefficient per row and column group, and one sum per bin.

    out[t, b W + c W/C + d] = sum_{j: bins[t, j] = b, ids[t, j] in [0, rows)} coef[t, j, c] table[ids[t, j], c W/C + d]

    Args:
        table: [rows, W], floating point.
        ids: [T, J], int32 or int64. Rows may repeat. An id outside [0, rows) is of a row that others hold: its entry is
            passed over.
        coef: [T, J, C], the table's dtype.
        bins: [T, J], int32 or int64 in [0, B): the sum that each entry belongs to. None: all belong to one.
        num_bins: B; 1 without `bins`.

    Returns:
        [T, B W], the table's dtype.
    """
    num_tokens, num_rows_read, num_groups = coef.shape
    if bins is None:
        bins = torch.zeros_like(ids)
    own = ((ids >= 0) & (ids < table.shape[0])).unsqueeze(2)
    rows = torch.where(own, table[ids.where(own.squeeze(2), 0)], 0)
    rows = rows.view(num_tokens, num_rows_read, num_groups, table.shape[1] // num_groups)
    member = F.one_hot(bins.long(), num_bins).to(table.dtype)
    return torch.einsum("tjc,tjb,tjcd->tbcd", torch.where(own, coef, 0), member, rows).reshape(
        num_tokens, num_bins * table.shape[1]
    )
