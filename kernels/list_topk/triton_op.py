"""Selection in Triton: scores as integers in their order, a threshold by bisection, and a sort of what lies above it.

A list's best K entries are found in two kernels. The first holds all keys of a list in registers and bisects for a
threshold that between K and `capacity` of them reach (exactly K in the worst case), and writes these to a scratch row.
The second sorts the row. `collect_best` is the first one's core; this file's kernels run it on lists, those of
`tucker_topk` and `product_topk` on their candidates.

The tile that holds a list has a column per thread (Triton's own layout then puts it there), so that maxima and running
counts of columns cost no exchange between threads.

The rest launches what the selections share: all but the kernel that scores the candidates.

Legend: T tokens, H heads, N keys per side, R Tucker rank, K kept, A x B the tile that holds a list, Q the scratch row's
capacity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launch import on_device_of
from kernels.common.tiles import scratch_capacity
from kernels.list_topk.naive import check_top_k

# Below every key, also that of -inf.
PADDING: tl.constexpr = tl.constexpr(-(2**31))
# Below every packed entry.
EMPTY: tl.constexpr = tl.constexpr(-(2**63))
LARGEST: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def ordered_key(score):
    """int32 keys that compare as the fp32 scores do in the order of `naive.list_topk`: NaN is the largest, -0 is 0."""
    # -0 + 0 is 0.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    # Negative numbers grow with falling magnitude: all bits but the sign are flipped.
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, LARGEST, key)


@triton.jit
def _lower_bound(keys, TOP_K: tl.constexpr):
    """A key that at least K entries reach: the smallest of K or more groups' maxima, or of all entries."""
    ROWS: tl.constexpr = keys.shape[0]
    WIDTH: tl.constexpr = keys.shape[1]
    if ROWS * WIDTH < 2 * TOP_K:
        bound = tl.min(tl.where(keys == PADDING, LARGEST, keys))
    else:
        # Groups per column; a power of two of at most ROWS.
        SPLIT: tl.constexpr = 1 if TOP_K <= WIDTH else triton.next_power_of_2(triton.cdiv(TOP_K, WIDTH))
        maxima = tl.max(tl.reshape(keys, [ROWS // SPLIT, SPLIT * WIDTH]), axis=0)
        used = maxima != PADDING
        enough = tl.sum(used.to(tl.int32)) >= TOP_K
        bound = tl.where(enough, tl.min(tl.where(used, maxima, LARGEST)), PADDING + 1)
    return bound.to(tl.int64)


@triton.jit
def _above(keys, positions, TOP_K: tl.constexpr, CAPACITY: tl.constexpr):
    """A mask of between K and `CAPACITY` entries with the best K among them.

    Two bisections over integers, so that they end, and end alike everywhere: for the largest key that K entries reach,
    and, if it is shared by too many, for the last position among these. Either stops as soon as few enough are left,
    which is nearly always in the first.
    """
    low = _lower_bound(keys, TOP_K)
    high = tl.max(keys).to(tl.int64)
    num_above = tl.sum((keys >= low.to(tl.int32)).to(tl.int32))
    while (num_above > CAPACITY) & (low < high):
        middle = low + (high - low + 1) // 2
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
        enough = count >= TOP_K
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        num_above = tl.where(enough, count, num_above)
    threshold = low.to(tl.int32)
    first = tl.min(positions)
    last = tl.max(positions)
    if num_above > CAPACITY:
        num_larger = tl.sum((keys > threshold).to(tl.int32))
        while (num_above > CAPACITY) & (first < last):
            middle = first + (last - first) // 2
            count = num_larger + tl.sum(((keys == threshold) & (positions <= middle)).to(tl.int32))
            enough = count >= TOP_K
            last = tl.where(enough, middle, last)
            first = tl.where(enough, first, middle + 1)
            num_above = tl.where(enough, count, num_above)
    return (keys > threshold) | ((keys == threshold) & (positions <= last))


@triton.jit
def collect_best(keys, positions, scratch, TOP_K: tl.constexpr, CAPACITY: tl.constexpr):
    """Writes the best K of a list, and up to `CAPACITY` - K others, unsorted into its scratch row.

    An entry is packed as key * 2^32 + (2^31 - 1 - position), which orders by key and then by smaller position.

    Args:
        keys: [A, B] int32 from `ordered_key`, PADDING where there is no entry; at least K entries.
        positions: [A, B] int32 in [0, 2^31), all different.
        scratch: pointer to CAPACITY int64.
    """
    above = _above(keys, positions, TOP_K, CAPACITY)
    counts = above.to(tl.int32)
    in_column = tl.sum(counts, axis=0)
    before = tl.cumsum(in_column, axis=0) - in_column
    places = before[None, :] + tl.cumsum(counts, axis=0) - 1
    packed = (keys.to(tl.int64) << 32) + (positions ^ 0x7FFFFFFF).to(tl.int64)
    tl.store(scratch + places, packed, mask=above)
    # The other places: the row is uninitialised memory.
    every = tl.arange(0, CAPACITY)
    tl.store(scratch + every, tl.full([CAPACITY], EMPTY, tl.int64), mask=every >= tl.sum(in_column))


@triton.jit
def sort_descending(entries, LOG_SIZE: tl.constexpr):
    """Each row of [L, Q] int64 by a bitonic network; LOG_SIZE is log2 Q."""
    # Runs of 2^run entries become sorted, in falling and rising order by turns, until one is left.
    for run in tl.static_range(1, LOG_SIZE + 1):
        for step in tl.static_range(run):
            entries = _compare_pairs(entries, 1 << (run - 1 - step), step, run == LOG_SIZE)
    return entries


@triton.jit
def _compare_pairs(entries, DISTANCE: tl.constexpr, STEP: tl.constexpr, LAST: tl.constexpr):
    """Puts the entries of every pair at this distance in order."""
    PAIRS: tl.constexpr = entries.shape[0] * entries.shape[1] // (2 * DISTANCE)
    mine = tl.reshape(entries, [PAIRS, 2, DISTANCE])
    # Exact also where the sum wraps around.
    partner = tl.sum(mine, axis=1, keep_dims=True) - mine
    second = tl.arange(0, 2)[None, :, None]
    rising = (tl.arange(0, PAIRS)[:, None, None] >> STEP) & (0 if LAST else 1)
    return tl.reshape(tl.where((mine > partner) == (second == rising), mine, partner), entries.shape)


@triton.jit
def sorted_positions(scratch, num_lists, first_list, LISTS: tl.constexpr, LOG_CAPACITY: tl.constexpr):
    """[LISTS, CAPACITY] int32: positions in the rows from `first_list` on, best first; the first K count."""
    CAPACITY: tl.constexpr = 1 << LOG_CAPACITY
    lists = first_list + tl.arange(0, LISTS)
    offsets = lists.to(tl.int64)[:, None] * CAPACITY + tl.arange(0, CAPACITY)[None, :]
    packed = tl.load(scratch + offsets, mask=(lists < num_lists)[:, None], other=EMPTY)
    packed = sort_descending(packed, LOG_CAPACITY)
    return (packed & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def collect_lists_kernel(
    row_scores,
    column_scores,
    row_directions,
    column_directions,
    scratch,
    num_heads,
    num_keys,
    stride_t,
    stride_h,
    stride_n,
    stride_r,
    TOP_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per (t, h) and side: keys ranked by <scores, direction>, or with RANK 0 by the score."""
    program = tl.program_id(0)
    side = tl.program_id(1)
    head = program % num_heads
    if side == 0:
        scores = row_scores
    else:
        scores = column_scores
    scores += (program // num_heads).to(tl.int64) * stride_t + head.to(tl.int64) * stride_h
    positions = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = positions < num_keys
    offsets = positions.to(tl.int64) * stride_n
    if RANK == 0:
        rank = tl.load(scores + offsets, mask=inside, other=0.0).to(tl.float32)
    else:
        if side == 0:
            directions = row_directions + head * RANK
        else:
            directions = column_directions + head * RANK
        rank = tl.load(scores + offsets, mask=inside, other=0.0).to(tl.float32) * tl.load(directions)
        for r in tl.static_range(1, RANK):
            score = tl.load(scores + offsets + r * stride_r, mask=inside, other=0.0).to(tl.float32)
            rank += score * tl.load(directions + r)
    keys = tl.where(inside, ordered_key(rank), PADDING)
    row = side * tl.num_programs(0).to(tl.int64) + program
    collect_best(keys, positions, scratch + row * CAPACITY, TOP_K, CAPACITY)


@triton.jit
def sort_lists_kernel(scratch, ids, num_lists, TOP_K: tl.constexpr, LOG_CAPACITY: tl.constexpr, LISTS: tl.constexpr):
    """ids[l, k] = position of the k-th best entry of list l."""
    first_list = tl.program_id(0) * LISTS
    positions = sorted_positions(scratch, num_lists, first_list, LISTS, LOG_CAPACITY)
    lists = first_list + tl.arange(0, LISTS)
    places = tl.arange(0, 1 << LOG_CAPACITY)[None, :]
    kept = (lists < num_lists)[:, None] & (places < TOP_K)
    tl.store(ids + lists.to(tl.int64)[:, None] * TOP_K + places, positions.to(tl.int64), mask=kept)


@triton.jit
def sort_candidates_kernel(
    scratch,
    stage_ids,
    retrieved,
    num_lists,
    ROW_TOP_K: tl.constexpr,
    TOP_K: tl.constexpr,
    LOG_CAPACITY: tl.constexpr,
    LISTS: tl.constexpr,
):
    """The row and column of the k-th best candidate of list l; its position a M + b is row a, column b of stage 1."""
    first_list = tl.program_id(0) * LISTS
    positions = sorted_positions(scratch, num_lists, first_list, LISTS, LOG_CAPACITY)
    lists = (first_list + tl.arange(0, LISTS))[:, None]
    places = tl.arange(0, 1 << LOG_CAPACITY)[None, :]
    kept = (lists < num_lists) & (places < TOP_K)
    from_list = stage_ids + lists.to(tl.int64) * ROW_TOP_K
    to_list = retrieved + lists.to(tl.int64) * TOP_K + places
    # Triton makes a Python number of an argument of 1: of a single list, which has no `.to`.
    side = tl.cast(num_lists, tl.int64)
    tl.store(to_list, tl.load(from_list + positions // ROW_TOP_K, mask=kept), mask=kept)
    columns = tl.load(from_list + side * ROW_TOP_K + positions % ROW_TOP_K, mask=kept)
    tl.store(to_list + side * TOP_K, columns, mask=kept)


MAX_ENTRIES = 1 << 14
"""The longest list, or largest grid of candidates, whose keys fit into the registers of a program."""
MAX_TOP_K = 1024
"""The most entries that are kept."""


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
        row_scores: [T, H, N], or with directions [T, H, N, R]; fp32. With directions also bf16, which
            is widened in registers.
        column_scores: scores of the shape and dtype of `row_scores`.
        directions: directions of the rows' rank and of the columns', [H, R] each, contiguous; None: keys are ranked by
            their scores.
        row_top_k: M.
        top_k: K.
        num_candidates: candidates that a program of the second stage holds.
        collect: launches the second stage's kernel. Takes row and column scores with equal strides, rows and columns
            kept by the first stage [2, T, H, M], and the scratch rows [T H, Q] for `collect_best`.

    Returns:
        Rows and columns kept by the first stage, [2, T, H, M], and those of the retrieved entries, [2, T, H, K]. int64.

    Raises:
        TypeError: the dtype is another one.
        ValueError: M or K is out of range, or the candidates are too many for a program's registers.
    """
    check_top_k(row_top_k, row_scores.shape[2])
    check_top_k(top_k, row_top_k**2)
    _check_supported(row_scores, num_candidates, top_k, may_be_narrow=directions is not None)
    if row_scores.stride() != column_scores.stride():
        row_scores, column_scores = row_scores.contiguous(), column_scores.contiguous()
    with on_device_of(row_scores):
        stage_ids = _best_of_both_sides(row_scores, column_scores, directions, row_top_k)
        retrieved = stage_ids.new_empty(*stage_ids.shape[:3], top_k)
        num_lists, row_capacity = row_scores.shape[0] * row_scores.shape[1], scratch_capacity(top_k)
        if num_lists:
            scratch = stage_ids.new_empty(num_lists, row_capacity)
            collect(row_scores, column_scores, stage_ids, scratch)
            lists = _lists_per_program(row_capacity)
            sort_candidates_kernel[(-(-num_lists // lists),)](
                *(scratch, stage_ids, retrieved, num_lists, row_top_k, top_k, row_capacity.bit_length() - 1, lists),
                num_warps=4,
            )
    return stage_ids, retrieved


def _best_of_both_sides(
    row_scores: Tensor, column_scores: Tensor, directions: tuple[Tensor, Tensor] | None, top_k: int
) -> Tensor:
    """Stage 1 of both sides, [2, T, H, K]; arguments as of `select_in_two_stages`, with equal strides."""
    num_tokens, num_heads, num_keys = row_scores.shape[:3]
    _check_supported(row_scores, num_keys, top_k, may_be_narrow=directions is not None)
    num_lists, row_capacity = 2 * num_tokens * num_heads, scratch_capacity(top_k)
    ids = torch.empty(2, num_tokens, num_heads, top_k, dtype=torch.int64, device=row_scores.device)
    if num_lists == 0:
        return ids
    scratch = torch.empty(num_lists, row_capacity, dtype=torch.int64, device=row_scores.device)
    num_entries = max(64, triton.next_power_of_2(num_keys))
    warps = num_warps(num_entries)
    # Without directions, any tensors stand for them.
    u, v = directions or (row_scores, column_scores)
    of_token, of_head, of_key, *of_rank = row_scores.stride()
    collect_lists_kernel[(num_tokens * num_heads, 2)](
        *(row_scores, column_scores, u, v, scratch, num_heads, num_keys),
        *(of_token, of_head, of_key, of_rank[0] if directions else 0),
        *(top_k, row_capacity, row_scores.shape[3] if directions else 0, num_entries // (32 * warps), 32 * warps),
        num_warps=warps,
        # The twin rounds products and sums one by one.
        enable_fp_fusion=False,
    )
    lists = _lists_per_program(row_capacity)
    sort_lists_kernel[(-(-num_lists // lists),)](
        *(scratch, ids, num_lists, top_k, row_capacity.bit_length() - 1, lists), num_warps=4
    )
    return ids


def _check_supported(scores: Tensor, num_entries: int, top_k: int, *, may_be_narrow: bool) -> None:
    """Raises TypeError for another dtype than fp32, or bf16 if it may be, ValueError for K of more entries than a program
    can hold."""
    if scores.dtype != torch.float32 and not (may_be_narrow and scores.dtype == torch.bfloat16):
        raise TypeError(f"the retrieval kernels take float32 scores, not {scores.dtype}: use train.kernels=naive")
    if num_entries > MAX_ENTRIES or top_k > MAX_TOP_K:
        raise ValueError(
            f"the retrieval kernels keep at most {MAX_TOP_K} of at most {MAX_ENTRIES} entries, not {top_k} of "
            f"{num_entries}: lower model.memory.row_top_k_limit or top_k, or use train.kernels=naive"
        )
