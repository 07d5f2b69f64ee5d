"""Reference of `tucker_topk`: the whole grid of candidates, sorted; the oracle of every other implementation.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.list_topk import naive


def tucker_topk(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Two-stage selection on the Tucker-scored grid (UltraMemV2, Eq. 6-7 and 16), not differentiable.

    Stage 1 ranks rows by <u, S_row> and columns by <v, S_col> and keeps M of each. Stage 2 scores the M x M candidates by
    S_row[i] C S_col[j] and keeps the best K. Both in the order of `kernels.list_topk.naive.list_topk`, where the position of a candidate
    is a M + b for the a-th best row and the b-th best column.

    Args:
        row_scores: [T, H, N, R].
        column_scores: [T, H, N, R].
        core_sum: [H, R, R], the cores summed.
        u: [H, R], direction of the rows' rank.
        v: [H, R], direction of the columns' rank.
        row_top_k: M <= N.
        top_k: K <= M^2.

    Returns:
        Rows and columns kept by stage 1, [2, T, H, M], and rows and columns of the retrieved slots, [2, T, H, K]. int64, best first.

    Raises:
        ValueError: if M or K is out of range.
    """
    row_ids = naive.list_topk(key_ranks(row_scores, u), row_top_k)
    column_ids = naive.list_topk(key_ranks(column_scores, v), row_top_k)
    grid = grid_scores(gather_keys(row_scores, row_ids), core_sum, gather_keys(column_scores, column_ids))
    best = naive.list_topk(grid.flatten(2), top_k)
    slots = torch.stack((row_ids.gather(2, best // row_top_k), column_ids.gather(2, best % row_top_k)))
    return torch.stack((row_ids, column_ids)), slots


def key_ranks(scores: Tensor, direction: Tensor) -> Tensor:
    """What stage 1 ranks keys by: scores [T, H, N, R] times direction [H, R], [T, H, N].

    Products and sums are rounded one by one, in the order of r, here as in every kernel: equal bits select equal keys.
    """
    return _sum_in_order(scores[..., r] * direction[:, r, None] for r in range(scores.shape[3]))


def grid_scores(rows: Tensor, core_sum: Tensor, columns: Tensor) -> Tensor:
    """Scores of all pairs of the candidates rows [T, H, M, R] and columns [T, H, M, R], [T, H, M, M]; rounded as `key_ranks`."""
    rank = core_sum.shape[1]
    # One contiguous tensor per r: with r innermost, no loop over candidates would be vectorised.
    row, column = rows.movedim(3, 0).contiguous(), columns.movedim(3, 0).contiguous()
    mixed = [_sum_in_order(row[r] * core_sum[:, r, s, None] for r in range(rank)) for s in range(rank)]
    return _sum_in_order(mixed[s].unsqueeze(3) * column[s].unsqueeze(2) for s in range(rank))


def gather_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """scores[t, h, ids[t, h, k], r]: [T, H, N, R] and [T, H, K] to [T, H, K, R]."""
    return scores.gather(2, ids.unsqueeze(3).expand(-1, -1, -1, scores.shape[3]))


def _sum_in_order(terms: Iterable[Tensor]) -> Tensor:
    iterator = iter(terms)
    total = next(iterator)
    for term in iterator:
        total += term
    return total
