"""`tucker_topk`: its signature, and the function in PyTorch and in C++.

No gradient: PyTorch differentiates the scores of what is selected. A custom op, which hides from tracing what depends
on the data.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K retrieved.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.common.ops import custom_op
from kernels.common.slices import token_slices
from kernels.list_topk.naive import check_top_k
from kernels.list_topk.op import torch_list_topk


class TuckerTopk(Protocol):
    """See `kernels.tucker_topk.naive.tucker_topk`. Not differentiable: to be called without gradients."""

    def __call__(
        self,
        row_scores: Tensor,
        column_scores: Tensor,
        core_sum: Tensor,
        u: Tensor,
        v: Tensor,
        row_top_k: int,
        top_k: int,
        /,
    ) -> tuple[Tensor, Tensor]: ...


def empty_result(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """The result, not filled yet; also the ops' fake for `torch.compile`."""
    num_tokens, num_heads = row_scores.shape[:2]
    stage_ids = row_scores.new_empty(2, num_tokens, num_heads, row_top_k, dtype=torch.int64)
    return stage_ids, stage_ids.new_empty(2, num_tokens, num_heads, top_k)


@custom_op("torch_tucker_topk", empty_result)
def torch_tucker_topk(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """The function of `kernels.tucker_topk.naive.tucker_topk`, without its [T, H, M, M] temporary."""
    num_tokens, num_heads = row_scores.shape[:2]
    row_ids = torch_list_topk(key_ranks(row_scores, u), row_top_k)
    column_ids = torch_list_topk(key_ranks(column_scores, v), row_top_k)
    rows, columns = gather_keys(row_scores, row_ids), gather_keys(column_scores, column_ids)
    best = torch.empty(num_tokens, num_heads, top_k, dtype=torch.int64, device=rows.device)
    for tokens in token_slices(num_tokens, num_heads * row_top_k**2):
        best[tokens] = torch_list_topk(grid_scores(rows[tokens], core_sum, columns[tokens]).flatten(2), top_k)
    retrieved = torch.stack((row_ids.gather(2, best // row_top_k), column_ids.gather(2, best % row_top_k)))
    return torch.stack((row_ids, column_ids)), retrieved


@custom_op("cpu_tucker_topk", empty_result)
def cpu_tucker_topk(
    row_scores: Tensor, column_scores: Tensor, core_sum: Tensor, u: Tensor, v: Tensor, row_top_k: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """The function of `kernels.tucker_topk.naive.tucker_topk`, to the bit."""
    num_tokens, num_heads, num_keys, rank = row_scores.shape
    check_top_k(row_top_k, num_keys)
    check_top_k(top_k, row_top_k**2)
    rows, columns, core_sum, u, v = cpp.lists(
        *(row_scores.transpose(2, 3), column_scores.transpose(2, 3)),
        *(core_sum.contiguous(), u.contiguous(), v.contiguous()),
    )
    stage_ids, retrieved = empty_result(row_scores, column_scores, core_sum, u, v, row_top_k, top_k)
    cpp.call(
        *("tucker_topk", "tucker_topk", cpp.type_of_scores(rows)),
        *(rows, columns, core_sum, u, v, stage_ids, retrieved),
        *(*rows.stride()[:3], *columns.stride()[:3]),
        *(num_tokens * num_heads, num_heads, num_keys, rank, row_top_k, top_k),
    )
    return stage_ids, retrieved


def key_ranks(scores: Tensor, direction: Tensor) -> Tensor:
    """Values that stage 1 ranks keys by: scores [T, H, N, R] times direction [H, R], [T, H, N].

    Products and sums are rounded one by one, in the order of r, here as in every kernel: equal bits select equal keys.
    """
    return _sum_in_order(scores[..., r] * direction[:, r, None] for r in range(scores.shape[3]))


def grid_scores(rows: Tensor, core_sum: Tensor, columns: Tensor) -> Tensor:
    """Scores [T, H, M, M] of all pairs of the rows and columns [T, H, M, R]; rounded as `key_ranks`."""
    rank = core_sum.shape[1]
    # One contiguous tensor per r: with r innermost, no loop over candidates would be vectorised.
    row, column = rows.movedim(3, 0).contiguous(), columns.movedim(3, 0).contiguous()
    mixed = [_sum_in_order(row[r] * core_sum[:, r, s, None] for r in range(rank)) for s in range(rank)]
    return _sum_in_order(mixed[s].unsqueeze(3) * column[s].unsqueeze(2) for s in range(rank))


def gather_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """scores[t, h, ids[t, h, k], r]: [T, H, N, R] and [T, H, K] to [T, H, K, R]."""
    return scores.gather(2, ids.unsqueeze(3).expand(-1, -1, -1, scores.shape[3]))


def _sum_in_order(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(Tensor.add_, terms)
