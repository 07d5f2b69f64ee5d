"""Product-key retrieval (PKM, Memory+, PEER; UltraMemV2, Eq. 3-4).

Legend: T tokens, H heads, N keys per side, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.retrieval.retrieved import Retrieved


def retrieve(row_scores: Tensor, column_scores: Tensor, *, row_top_k: int, top_k: int) -> Retrieved:
    """Top-K of the sums of a row and a column score, softmaxed within a head.

    The K best sums lie among the K best rows and columns, so with M = K the selection is exact; a smaller M is an approximation that the
    releases do not have. Gradients flow through the scores of the kept entries only.

    Args:
        row_scores: [T, H, N].
        column_scores: [T, H, N].
        row_top_k: M.
        top_k: K <= M^2.
    """
    num_keys = row_scores.shape[2]
    with torch.no_grad():
        best_row_scores, row_ids = row_scores.topk(row_top_k, dim=-1)
        best_column_scores, column_ids = column_scores.topk(row_top_k, dim=-1)
        grid = best_row_scores.unsqueeze(3) + best_column_scores.unsqueeze(2)
        best = grid.flatten(2).topk(top_k, dim=-1).indices
        rows = row_ids.gather(2, best // row_top_k)
        columns = column_ids.gather(2, best % row_top_k)
    scores = (row_scores.gather(2, rows) + column_scores.gather(2, columns)).softmax(-1)
    return Retrieved(rows * num_keys + columns, scores.unsqueeze(3), row_ids, column_ids, row_scores, column_scores)
