"""Reference of `tucker_scores`: the formula, and autograd's gradients; the oracle of every other implementation.

Legend: T tokens, H heads, N keys per side, R Tucker rank, C cores, K kept entries per token and head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tucker_scores(scores: Tensor, cores: Tensor, entries: Tensor) -> Tensor:
    """Each core's scores of the kept entries (UltraMemV2, Eq. 16): out[t, h, k, c] = S_row[i]^T C_c S_col[j].

    Args:
        scores: [2, T, H, N, R], of rows and of columns. In bf16 they are widened where they are kept.
        cores: [C, H, R, R].
        entries: [2, T, H, K], int64, the row i and the column j of each entry; an entry may be there several times.

    Returns:
        [T, H, K, C], differentiable in scores and cores.
    """
    token = torch.arange(scores.shape[1], device=scores.device)[:, None, None]
    head = torch.arange(scores.shape[2], device=scores.device)[:, None]
    rows, columns = (side[token, head, ids].to(cores.dtype) for side, ids in zip(scores, entries, strict=True))
    return torch.einsum("thkr,chrs,thks->thkc", rows, cores, columns)
