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


def dot_rows(table: Tensor, ids: Tensor, x: Tensor, num_groups: int, block: Tensor | None = None) -> Tensor:
    """One `gather_dot` per column group: the reference of `kernels.pieces.DotRows`. Arguments and result as there."""
    width = table.shape[1]
    num_blocks = x.shape[1] // width if width else 1
    per_group = zip(
        table.view(-1, num_groups, width // num_groups).unbind(1),
        x.reshape(x.shape[0], num_blocks, num_groups, width // num_groups).unbind(2),
        strict=True,
    )
    return torch.stack(
        [gather_dot(columns, ids, part.reshape(x.shape[0], -1), block, num_blocks) for columns, part in per_group],
        dim=2,
    )
