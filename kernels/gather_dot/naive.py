"""Reference of `gather_dot`: plain differentiable PyTorch, the oracle of every other implementation.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_dot(table: Tensor, ids: Tensor, x: Tensor, num_groups: int = 1, bins: Tensor | None = None) -> Tensor:
    """Products of gathered table rows with a vector of their token, one per column group.

    out[t, j, c] = <table[ids[t, j], group c], x[t, bins[t, j], group c]> with x seen as [T, B, W], and group c being
    columns [c W/C, (c + 1) W/C); 0 where ids[t, j] is outside [0, rows)

    Args:
        table: [rows, W], floating point.
        ids: [T, J], int32 or int64. Rows may repeat. An id outside [0, rows) is of a row that others hold.
        x: [T, B W], the table's dtype.
        num_groups: C.
        bins: [T, J], int32 or int64 in [0, B): the vector that each entry meets. None: B is 1.

    Returns:
        [T, J, C], the dtype of `x`.
    """
    num_tokens, num_rows_read = ids.shape
    width = table.shape[1]
    num_bins = 1 if bins is None else x.shape[1] // width
    per_group = (num_groups, width // num_groups)
    own = ((ids >= 0) & (ids < table.shape[0])).unsqueeze(2)
    rows = torch.where(own, table[ids.where(own.squeeze(2), 0)], 0).view(num_tokens, num_rows_read, *per_group)
    member = F.one_hot((torch.zeros_like(ids) if bins is None else bins).long(), num_bins).to(table.dtype)
    products = torch.einsum("tjcd,tjb,tbcd->tjc", rows, member, x.reshape(num_tokens, num_bins, *per_group))
    return torch.where(own, products, 0)
