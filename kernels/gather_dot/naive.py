"""Reference of `gather_dot`: plain differentiable PyTorch, the oracle of every other implementation.

Legend: R table rows, T tokens, J rows read per token, W columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_dot(table: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Products of gathered table rows with one vector per token.

    out[t, j] = <table[ids[t, j]], x[t]>

    Args:
        table: [R, W], floating point.
        ids: [T, J], int64 in [0, R). Rows may repeat.
        x: [T, W], the table's dtype.

    Returns:
        [T, J], the table's dtype.
    """
    return torch.einsum("tjw,tw->tj", table[ids], x)
