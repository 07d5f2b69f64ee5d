"""Product-key retrieval (PKM, Memory+, PEER; UltraMemV2, Eq. 3-4).

Legend: T tokens, H heads, N keys per side, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kept_scores import kept_scores
from kernels.product_topk.op import ProductTopk, torch_product_topk
from megamem.retrieval.retrieved import Retrieved


def retrieve(
    row_scores: Tensor, column_scores: Tensor, *, row_top_k: int, top_k: int, select: ProductTopk = torch_product_topk
) -> Retrieved:
    """Top-K of the sums of a row and a column score, softmaxed within a head.

    The K best sums lie among the K best rows and columns, so with M = K the selection is exact; a smaller M is an
    approximation that the releases do not have. Gradients flow through the scores of the kept entries only.

    Args:
        row_scores: [T, H, N].
        column_scores: [T, H, N].
        row_top_k: M.
        top_k: K <= M^2.
        select: the selection, which also settles what comes first among equal scores.
    """
    num_keys = row_scores.shape[2]
    with torch.no_grad():
        stage_ids, entries = select(row_scores, column_scores, row_top_k, top_k)
        rows, columns = entries.unbind(0)
    sums = kept_scores(row_scores.unsqueeze(3), rows) + kept_scores(column_scores.unsqueeze(3), columns)
    return Retrieved(
        rows * num_keys + columns, sums.softmax(2), stage_ids, lambda: torch.stack((row_scores, column_scores))
    )
