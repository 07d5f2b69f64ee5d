"""Reference of `tucker_topk`: the whole grid of candidates, sorted; the oracle of every other implementation.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from kernels.list_topk.naive import list_topk


def tucker_topk(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Two-stage selection on the Tucker-scored grid (UltraMemV2, Eq. 6-7 and 16), not differentiable.

    Stage 1 ranks rows by <u, S_row> and columns by <v, S_col> and keeps M of each. Stage 2 scores the M x M candidates
    by S_row[i] C S_col[j] and keeps the best K. Both in the order of `kernels.list_topk.naive.list_topk`, where the
    position of a candidate is a M + b for the a-th best row and the b-th best column.

    Args:
        row_scores: [T, H, N, R]; in bf16 they are widened to the other operands' dtype, which is exact.
        column_scores: [T, H, N, R].
        core_sum: [H, R, R], the cores summed.
        u: [H, R], direction of the rows' rank.
        v: [H, R], direction of the columns' rank.
        row_top_k: M <= N.
        top_k: K <= M^2.

    Returns:
        Rows and columns kept by stage 1, [2, T, H, M], and rows and columns of the retrieved entries, [2, T, H, K].
        int64, best first.

    Raises:
        ValueError: M or K is out of range.
    """
    # Products and sums are rounded one by one, in the order of r, here as in every implementation: equal bits select
    # equal keys.
    ranks = range(core_sum.shape[1])
    row_ids = list_topk(_sum(row_scores[..., r] * u[:, r, None] for r in ranks), row_top_k)
    column_ids = list_topk(_sum(column_scores[..., r] * v[:, r, None] for r in ranks), row_top_k)
    rows = [row_scores[..., r].gather(2, row_ids) for r in ranks]
    columns = [column_scores[..., r].gather(2, column_ids) for r in ranks]
    mixed = [_sum(rows[r] * core_sum[:, r, s, None] for r in ranks) for s in ranks]
    grid = _sum(mixed[s].unsqueeze(3) * columns[s].unsqueeze(2) for s in ranks)
    best = list_topk(grid.flatten(2), top_k)
    retrieved = torch.stack((row_ids.gather(2, best // row_top_k), column_ids.gather(2, best % row_top_k)))
    return torch.stack((row_ids, column_ids)), retrieved


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, terms)
