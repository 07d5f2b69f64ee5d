"""Reference of `product_topk`: the whole grid of candidates, sorted; the oracle of every other implementation.

Legend: T tokens, H heads, N keys per side, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.list_topk.naive import list_topk


def product_topk(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Two-stage selection of the best sums of a row and a column score (UltraMemV2, Eq. 3-4), not differentiable.

    Stage 1 keeps the M best rows and columns, stage 2 the K best of their M x M sums. Both in the order of
    `kernels.list_topk.naive.list_topk`, where the position of a candidate is a M + b for the a-th best row and the b-th
    best column.

    Args:
        row_scores: [T, H, N].
        column_scores: [T, H, N].
        row_top_k: M <= N.
        top_k: K <= M^2.

    Returns:
        Rows and columns kept by stage 1, [2, T, H, M], and rows and columns of the retrieved entries, [2, T, H, K].
        int64, best first.

    Raises:
        ValueError: M or K is out of range.
    """
    row_ids = list_topk(row_scores, row_top_k)
    column_ids = list_topk(column_scores, row_top_k)
    grid = row_scores.gather(2, row_ids).unsqueeze(3) + column_scores.gather(2, column_ids).unsqueeze(2)
    best = list_topk(grid.flatten(2), top_k)
    retrieved = torch.stack((row_ids.gather(2, best // row_top_k), column_ids.gather(2, best % row_top_k)))
    return torch.stack((row_ids, column_ids)), retrieved
