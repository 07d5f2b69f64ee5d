"""`product_topk`: its signature, and the function in PyTorch and in C++.

No gradient: PyTorch differentiates the scores of what is selected. A custom op, which hides from tracing what depends
on the data.

Legend: T tokens, H heads, N keys per side, M rows (and columns) kept by the first stage, K retrieved, Q candidates,
about K ln K.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.common.ops import custom_op
from kernels.common.slices import token_slices
from kernels.list_topk.naive import check_top_k
from kernels.list_topk.op import torch_list_topk


class ProductTopk(Protocol):
    """See `kernels.product_topk.naive.product_topk`. Not differentiable: to be called without gradients."""

    def __call__(
        self, row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int, /
    ) -> tuple[Tensor, Tensor]: ...


def empty_result(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The result, not filled yet; also the ops' fake for `torch.compile`."""
    num_tokens, num_heads = row_scores.shape[:2]
    stage_ids = row_scores.new_empty(2, num_tokens, num_heads, row_top_k, dtype=torch.int64)
    return stage_ids, stage_ids.new_empty(2, num_tokens, num_heads, top_k)


@custom_op("torch_product_topk", empty_result)
def torch_product_topk(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The function of `kernels.product_topk.naive.product_topk`."""
    num_tokens, num_heads = row_scores.shape[:2]
    row_ids, column_ids = torch_list_topk(row_scores, row_top_k), torch_list_topk(column_scores, row_top_k)
    best_rows, best_columns = row_scores.gather(2, row_ids), column_scores.gather(2, column_ids)
    row_places, column_places = candidate_places(row_top_k, top_k, row_scores.device)
    best = torch.empty(num_tokens, num_heads, top_k, dtype=torch.int64, device=row_scores.device)
    for tokens in token_slices(num_tokens, num_heads * len(row_places)):
        sums = best_rows[tokens].index_select(2, row_places) + best_columns[tokens].index_select(2, column_places)
        best[tokens] = torch_list_topk(sums, top_k)
    retrieved = torch.stack((row_ids.gather(2, row_places[best]), column_ids.gather(2, column_places[best])))
    return torch.stack((row_ids, column_ids)), retrieved


@custom_op("cpu_product_topk", empty_result)
def cpu_product_topk(row_scores: Tensor, column_scores: Tensor, row_top_k: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The function of `kernels.product_topk.naive.product_topk`."""
    num_tokens, num_heads, num_keys = row_scores.shape
    check_top_k(row_top_k, num_keys)
    check_top_k(top_k, row_top_k**2)
    rows, columns = cpp.lists(row_scores, column_scores)
    stage_ids, retrieved = empty_result(row_scores, column_scores, row_top_k, top_k)
    cpp.call(
        *("product_topk", "product_topk", cpp.type_of_scores(rows), rows, columns, stage_ids, retrieved),
        *(*rows.stride()[:2], *columns.stride()[:2]),
        *(num_tokens * num_heads, num_heads, num_keys, row_top_k, top_k),
    )
    return stage_ids, retrieved


def candidate_places(row_top_k: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places a and b in the sorted lists, [Q] each, of the pairs with (a + 1)(b + 1) <= K, in the order of a M + b.

    Every other pair has K pairs before it: see README.md. On devices all pairs: counting these would wait for the
    device.
    """
    pair = torch.arange(row_top_k**2, device=device)
    row_places, column_places = pair // row_top_k, pair % row_top_k
    if device.type != "cpu":
        return row_places, column_places
    kept = (row_places + 1) * (column_places + 1) <= top_k
    return row_places[kept], column_places[kept]
