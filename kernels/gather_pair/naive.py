"""Reference of `gather_pair`: plain differentiable PyTorch, the oracle of every other implementation.

Legend: T tokens, J rows read per token, C column groups, P pre-value columns, V value columns (C divides V), B bins.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_pair(
    pre_values: Tensor,
    values: Tensor,
    ids: Tensor,
    x: Tensor,
    scores: Tensor,
    activation: Literal["none", "gelu"] = "none",
    bins: Tensor | None = None,
    num_bins: int = 1,
) -> Tensor:
    """Sums of value rows, weighted by their scores and by the activated products of their pre-value rows with x.

    out[t, b V + c V/C + d] =
        sum_{j: bins[t, j] = b} scores[t, j, c] act(<pre_values[ids[t, j]], x[t]>) values[ids[t, j], c V/C + d]

    Args:
        pre_values: [rows, P], floating point.
        values: [rows, V], the same dtype.
        ids: [T, J], int64 in [0, rows). Rows may repeat.
        x: [T, P], the tables' dtype.
        scores: [T, J, C], the tables' dtype.
        activation: act.
        bins: [T, J], int64 in [0, B): the sum that each entry belongs to. None: all belong to one.
        num_bins: B; 1 without `bins`.

    Returns:
        [T, B V], the tables' dtype.
    """
    num_tokens, num_rows_read, num_groups = scores.shape
    products = torch.einsum("tjp,tp->tj", pre_values[ids], x)
    hidden = products if activation == "none" else F.gelu(products)
    rows = values[ids].view(num_tokens, num_rows_read, num_groups, values.shape[1] // num_groups)
    member = F.one_hot(torch.zeros_like(ids) if bins is None else bins, num_bins).to(values.dtype)
    sums = torch.einsum("tjc,tj,tjb,tjcd->tbcd", scores, hidden, member, rows)
    return sums.reshape(num_tokens, num_bins * values.shape[1])
