"""Launches what the selections share in Triton: all but the kernel that scores the candidates.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K kept, Q the
scratch row's capacity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from kernels.common.checks import check_top_k
from kernels.common.launch import on_device_of
from kernels.list_topk.triton_kernel import collect_lists_kernel, sort_candidates_kernel, sort_lists_kernel

MAX_ENTRIES = 1 << 14
"""The longest list, or largest grid of candidates, whose keys fit into the registers of a program."""
MAX_TOP_K = 1024
"""The most entries that are kept."""


def _capacity(top_k: int) -> int:
    """Q: a power of two with room for a quarter more than K, so that the bisection has something to hit."""
    return max(16, triton.next_power_of_2(top_k + top_k // 4))


def num_warps(num_entries: int) -> int:
    """Warps that hold a power of two of keys, mostly 32 per thread."""
    return max(1, min(16, num_entries // 1024))


def _lists_per_program(row_capacity: int) -> int:
    """Scratch rows that one program sorts: 1,024 entries or more."""
    return max(1, 1024 // row_capacity)


def select_in_two_stages(
    row_scores: Tensor,
    column_scores: Tensor,
    directions: tuple[Tensor, Tensor] | None,
    row_top_k: int,
    top_k: int,
    *,
    num_candidates: int,
    collect: Callable[[Tensor, Tensor, Tensor, Tensor], None],
) -> tuple[Tensor, Tensor]:
    """The M best rows and columns, and the K best of their candidates.

    Args:
        row_scores: [T, H, N], or with directions [T, H, N, R]; fp32.
        column_scores: like them.
        directions: of the rows' rank and of the columns', [H, R] each, contiguous; None: keys are ranked by their
            scores.
        row_top_k: M.
        top_k: K.
        num_candidates: that a program of the second stage holds.
        collect: launches the second stage's kernel. Takes row and column scores with equal strides, rows and columns
            kept by the first stage [2, T, H, M], and the scratch rows [T H, Q] for `collect_best`.

    Returns:
        Rows and columns kept by the first stage, [2, T, H, M], and those of the retrieved entries, [2, T, H, K]. int64.

    Raises:
        TypeError: for another dtype than fp32.
        ValueError: if M or K is out of range, or there are too many candidates for a program's registers.
    """
    check_top_k(row_top_k, row_scores.shape[2])
    check_top_k(top_k, row_top_k**2)
    _check_supported(row_scores, num_candidates, top_k)
    if row_scores.stride() != column_scores.stride():
        row_scores, column_scores = row_scores.contiguous(), column_scores.contiguous()
    with on_device_of(row_scores):
        stage_ids = _best_of_both_sides(row_scores, column_scores, directions, row_top_k)
        retrieved = stage_ids.new_empty(*stage_ids.shape[:3], top_k)
        num_lists, row_capacity = retrieved[0, :, :, 0].numel(), _capacity(top_k)
        if num_lists:
            scratch = stage_ids.new_empty(num_lists, row_capacity)
            collect(row_scores, column_scores, stage_ids, scratch)
            lists = _lists_per_program(row_capacity)
            sort_candidates_kernel[(triton.cdiv(num_lists, lists),)](
                scratch,
                stage_ids,
                retrieved,
                num_lists,
                ROW_TOP_K=row_top_k,
                TOP_K=top_k,
                LOG_CAPACITY=row_capacity.bit_length() - 1,
                LISTS=lists,
                num_warps=4,
            )
    return stage_ids, retrieved


def _best_of_both_sides(
    row_scores: Tensor, column_scores: Tensor, directions: tuple[Tensor, Tensor] | None, top_k: int
) -> Tensor:
    """Stage 1 of both sides, [2, T, H, K]; arguments as of `select_in_two_stages`, with equal strides."""
    num_tokens, num_heads, num_keys = row_scores.shape[:3]
    _check_supported(row_scores, num_keys, top_k)
    num_lists, row_capacity = 2 * num_tokens * num_heads, _capacity(top_k)
    ids = torch.empty(2, num_tokens, num_heads, top_k, dtype=torch.int64, device=row_scores.device)
    if num_lists == 0:
        return ids
    scratch = torch.empty(num_lists, row_capacity, dtype=torch.int64, device=row_scores.device)
    num_entries = max(64, triton.next_power_of_2(num_keys))
    warps = num_warps(num_entries)
    # Without directions, any tensors stand for them.
    u, v = directions or (row_scores, column_scores)
    collect_lists_kernel[(num_tokens * num_heads, 2)](
        row_scores,
        column_scores,
        u,
        v,
        scratch,
        num_heads,
        num_keys,
        *row_scores.stride()[:3],
        row_scores.stride(3) if directions else 0,
        TOP_K=top_k,
        CAPACITY=row_capacity,
        RANK=row_scores.shape[3] if directions else 0,
        ROWS=num_entries // (32 * warps),
        WIDTH=32 * warps,
        num_warps=warps,
        # The twin rounds products and sums one by one.
        enable_fp_fusion=False,
    )
    lists = _lists_per_program(row_capacity)
    sort_lists_kernel[(triton.cdiv(num_lists, lists),)](
        scratch, ids, num_lists, TOP_K=top_k, LOG_CAPACITY=row_capacity.bit_length() - 1, LISTS=lists, num_warps=4
    )
    return ids


def _check_supported(scores: Tensor, num_entries: int, top_k: int) -> None:
    """Raises TypeError for another dtype than fp32, ValueError for K of more entries than a program can hold."""
    if scores.dtype != torch.float32:
        raise TypeError(f"the retrieval kernels take float32 scores, not {scores.dtype}: use train.kernels=naive")
    if num_entries > MAX_ENTRIES or top_k > MAX_TOP_K:
        raise ValueError(
            f"the retrieval kernels keep at most {MAX_TOP_K} of at most {MAX_ENTRIES} entries, not {top_k} of "
            f"{num_entries}: lower model.memory.row_top_k_limit or top_k, or use train.kernels=naive"
        )
