"""Reference of `gather_dot`: plain differentiable PyTorch, the oracle of every other implementation.

Legend: R table rows, T tokens, J rows read per token, W columns, B blocks of entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_dot(table: Tensor, ids: Tensor, x: Tensor, block: Tensor | None = None, num_blocks: int = 1) -> Tensor:
    """Products of gathered table rows with a vector of their token, one per block of entries.

    out[t, j] = <table[ids[t, j]], x[t, block[t, j]]> with x seen as [T, B, W]

    Args:
        table: [R, W], floating point.
        ids: [T, J], int64 in [0, R). Rows may repeat.
        x: [T, B W], the table's dtype.
        block: [T, J], int64 in [0, B): the vector that each entry meets. None: all meet the same.
        num_blocks: B; 1 without `block`.

    Returns:
        [T, J], the table's dtype.
    """
    if block is None:
        block = torch.zeros_like(ids)
    member = F.one_hot(block, num_blocks).to(table.dtype)
    return torch.einsum("tjw,tjb,tbw->tj", table[ids], member, x.view(x.shape[0], num_blocks, table.shape[1]))
