"""Launches what the selections share in Triton: the stage that ranks keys, and the sort that ends both stages.

Legend: T tokens, H heads, N keys per side, R Tucker rank, M rows (and columns) kept by the first stage, K kept, Q the
scratch row's capacity.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.list_topk.triton_kernel import collect_lists_kernel, sort_lists_kernel, sort_slots_kernel

MAX_ENTRIES = 1 << 14
"""The longest list, or largest grid of candidates, whose keys fit into the registers of a program."""
MAX_TOP_K = 1024
"""The most entries that are kept."""


def capacity(top_k: int) -> int:
    """Q: a power of two with room for a quarter more than K, so that the bisection has something to hit."""
    return max(16, triton.next_power_of_2(top_k + top_k // 4))


def num_warps(num_entries: int) -> int:
    """Warps that hold a power of two of keys, mostly 32 per thread."""
    return max(1, min(16, num_entries // 1024))


def lists_per_program(row_capacity: int) -> int:
    """Scratch rows that one program sorts: 1,024 entries or more."""
    return max(1, 1024 // row_capacity)


def check_supported(scores: Tensor, num_entries: int, top_k: int) -> None:
    """Raises for what the kernels cannot do.

    Args:
        scores: of the keys.
        num_entries: of the longest list or largest grid of candidates.
        top_k: entries kept of it.

    Raises:
        TypeError: for another dtype than fp32.
        ValueError: for a grid that is too large.
    """
    if scores.dtype != torch.float32:
        raise TypeError(f"the retrieval kernels take float32 scores, not {scores.dtype}: use train.kernels=naive")
    if num_entries > MAX_ENTRIES or top_k > MAX_TOP_K:
        raise ValueError(
            f"the retrieval kernels keep at most {MAX_TOP_K} of at most {MAX_ENTRIES} entries, not {top_k} of "
            f"{num_entries}: lower model.memory.row_top_k_limit or top_k, or use train.kernels=naive"
        )


def best_of_both_sides(
    row_scores: Tensor, column_scores: Tensor, directions: tuple[Tensor, Tensor] | None, top_k: int
) -> Tensor:
    """Stage 1 of both sides.

    Args:
        row_scores: [T, H, N], or with directions [T, H, N, R]; fp32.
        column_scores: like them, also in their strides: see `with_equal_strides`.
        directions: of the rows' rank and of the columns', [H, R] each.
        top_k: K.

    Returns:
        [2, T, H, K], int64.
    """
    num_tokens, num_heads, num_keys = row_scores.shape[:3]
    check_supported(row_scores, num_keys, top_k)
    num_lists, row_capacity = 2 * num_tokens * num_heads, capacity(top_k)
    ids = torch.empty(2, num_tokens, num_heads, top_k, dtype=torch.int64, device=row_scores.device)
    if num_lists == 0:
        return ids
    scratch = torch.empty(num_lists, row_capacity, dtype=torch.int64, device=row_scores.device)
    num_entries = max(64, triton.next_power_of_2(num_keys))
    warps = num_warps(num_entries)
    row_direction, column_direction = directions or (row_scores, column_scores)
    collect_lists_kernel[(num_tokens * num_heads, 2)](
        row_scores,
        column_scores,
        row_direction.contiguous() if directions else row_direction,
        column_direction.contiguous() if directions else column_direction,
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
    lists = lists_per_program(row_capacity)
    sort_lists_kernel[(triton.cdiv(num_lists, lists),)](
        scratch, ids, num_lists, TOP_K=top_k, LOG_CAPACITY=row_capacity.bit_length() - 1, LISTS=lists, num_warps=4
    )
    return ids


def best_slots(scratch: Tensor, stage_ids: Tensor, top_k: int) -> Tensor:
    """Rows and columns of the best candidates.

    Args:
        scratch: [T H, Q], int64 from `collect_best`.
        stage_ids: [2, T, H, M], int64: what stage 1 kept of rows and of columns.
        top_k: K.

    Returns:
        [2, T, H, K], int64.
    """
    slots = stage_ids.new_empty(*stage_ids.shape[:3], top_k)
    num_lists, row_capacity = scratch.shape
    lists = lists_per_program(row_capacity)
    sort_slots_kernel[(triton.cdiv(num_lists, lists),)](
        scratch,
        stage_ids,
        slots,
        num_lists,
        ROW_TOP_K=stage_ids.shape[3],
        TOP_K=top_k,
        LOG_CAPACITY=row_capacity.bit_length() - 1,
        LISTS=lists,
        num_warps=4,
    )
    return slots


def with_equal_strides(row_scores: Tensor, column_scores: Tensor) -> tuple[Tensor, Tensor]:
    """As they are where their strides agree, as those of the layers do; contiguous otherwise."""
    if row_scores.stride() == column_scores.stride():
        return row_scores, column_scores
    return row_scores.contiguous(), column_scores.contiguous()
