"""`tucker_topk` in PyTorch on CPU, in chunks of tokens whose candidates stay in cache.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.chunks import token_chunks
from kernels.list_topk.selection import list_topk
from kernels.tucker_topk.naive import gather_keys, grid_scores, key_ranks


def tucker_topk(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """The function of `kernels.tucker_topk.naive.tucker_topk`, without its [T, H, M, M] temporary."""
    num_tokens, num_heads = row_scores.shape[:2]
    row_ids = list_topk(key_ranks(row_scores, u), row_top_k)
    column_ids = list_topk(key_ranks(column_scores, v), row_top_k)
    rows, columns = gather_keys(row_scores, row_ids), gather_keys(column_scores, column_ids)
    best = torch.empty(num_tokens, num_heads, top_k, dtype=torch.int64)
    for chunk in token_chunks(num_tokens, num_heads * row_top_k**2):
        best[chunk] = list_topk(grid_scores(rows[chunk], core_sum, columns[chunk]).flatten(2), top_k)
    slots = torch.stack((row_ids.gather(2, best // row_top_k), column_ids.gather(2, best % row_top_k)))
    return torch.stack((row_ids, column_ids)), slots
