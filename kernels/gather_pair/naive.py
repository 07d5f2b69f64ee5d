"""Reference of `gather_pair`: plain differentiable PyTorch, the oracle of every other implementation.

Legend: R table rows, T tokens, J rows read per token, C scores per row, P pre-value columns, V value columns (C divides V), B blocks of entries.
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
    block: Tensor | None = None,
    num_blocks: int = 1,
) -> Tensor:
    """Sums of value rows, each weighted by its score and by the activated product of its pre-value row with a vector of the token.

    out[t, b V + c V/C + d] = sum_{j: block[t, j] = b} scores[t, j, c] act(<pre_values[ids[t, j]], x[t]>) values[ids[t, j], c V/C + d]

    Args:
        pre_values: [R, P], floating point.
        values: [R, V], the same dtype.
        ids: [T, J], int64 in [0, R). Rows may repeat.
        x: [T, P], the tables' dtype.
        scores: [T, J, C], the tables' dtype.
        activation: act.
        block: [T, J], int64 in [0, B): the sum that each entry belongs to. None: all belong to one.
        num_blocks: B; 1 without `block`.

    Returns:
        [T, B V], the tables' dtype.
    """
    num_tokens, num_rows_read, num_groups = scores.shape
    products = torch.einsum("tjp,tp->tj", pre_values[ids], x)
    hidden = products if activation == "none" else F.gelu(products)
    rows = values[ids].view(num_tokens, num_rows_read, num_groups, values.shape[1] // num_groups)
    member = F.one_hot(torch.zeros_like(ids) if block is None else block, num_blocks).to(values.dtype)
    sums = torch.einsum("tjc,tj,tjb,tjcd->tbcd", scores, hidden, member, rows)
    return sums.reshape(num_tokens, num_blocks * values.shape[1])
