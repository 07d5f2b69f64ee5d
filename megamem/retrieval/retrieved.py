"""Result of a retrieval, for the lookup and for usage metrics.

Legend: T tokens, H heads, N keys per side, C scores per entry (Tucker cores), M rows (and columns) kept by the first
stage, K retrieved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Retrieved:
    """Entries that one layer retrieved for T tokens.

    Attributes:
        entries: [T, H, K], int64 positions row x N + column of the N x N grid, best first within a head.
        scores: [T, H, K, C], the weights of the entries. Tucker: the score of each core; they sum to what the selection
            ordered by. Product keys: the softmax of the summed scores within a head, C = 1.
        stage_ids: [2, T, H, M], int64 rows and columns kept by the first stage, best first.
        stage_scores: what the first stage ranked rows and columns by, [2, T, H, N]; differentiable, for the balance
            loss. Computed when called, because nothing else needs them.
    """

    entries: Tensor
    scores: Tensor
    stage_ids: Tensor
    stage_scores: Callable[[], Tensor]
