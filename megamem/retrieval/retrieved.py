"""What a retrieval hands to the lookup, and to whoever watches it.

Legend: T tokens, H heads, N keys per side, C scores per entry (Tucker cores), M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Retrieved:
    """What one layer retrieved for T tokens.

    Attributes:
        slots: [T, H, K], int64 positions row x N + column of the N x N grid, best first within a head.
        scores: [T, H, K, C], the weights of the entries. Tucker: the score of each core; they sum to what the selection ordered by.
            Product keys: the softmax of the summed scores within a head, C = 1.
        row_ids: [T, H, M], int64 rows kept by the first stage, best first.
        column_ids: [T, H, M], the columns.
        row_scores: [T, H, N], what the first stage ranked rows by; differentiable, for the balance loss.
        column_scores: [T, H, N], the same of the columns.
    """

    slots: Tensor
    scores: Tensor
    row_ids: Tensor
    column_ids: Tensor
    row_scores: Tensor
    column_scores: Tensor
