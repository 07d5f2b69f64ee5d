"""`tucker_scores` in Triton: a pass forward; in backward one over the entries, and one that adds those of equal keys.

No product of R x R matrices, no sort and no atomics: a list's entries are few enough to be compared with each other.

Legend: T tokens, H heads, N keys per side, R Tucker rank, C cores, K kept entries per token and head; a list is those of
a token and head.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.ops import custom_op, needs_gradient
from kernels.common.tiles import list_tile
from kernels.tucker_scores.op import empty_result

_COMPARED = 32
"""Entries that are compared with as many others at a time."""


@triton.jit
def tucker_scores_kernel(
    scores,
    cores,
    entries,
    out,
    kept,
    T,
    H,
    K,
    of_side,
    of_token,
    of_head,
    of_key,
    of_rank,
    C: tl.constexpr,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
    KEPT: tl.constexpr,
    SUM: tl.constexpr,
):
    """out[t, h, k, c] = sum_s (sum_r row[r] core[c, r, s]) column[s]; the grid is (tiles of tokens, H).

    Row and column scores are copied to `kept` [2, R, T, H, K], for backward. `of_side` to `of_rank` are the strides of
    scores.
    """
    head = tl.program_id(1)
    at, there, per_rank = _tile(T, H, K, TOKENS, KEPT)
    start = scores + (at // (H * K)) * of_token + head * of_head
    row = start + tl.load(entries + at, mask=there, other=0) * of_key
    column = start + of_side + tl.load(entries + per_rank + at, mask=there, other=0) * of_key
    for r in tl.static_range(R):
        tl.store(kept + r * per_rank + at, tl.load(row + r * of_rank, mask=there, other=0), mask=there)
        tl.store(kept + (R + r) * per_rank + at, tl.load(column + r * of_rank, mask=there, other=0), mask=there)
    for c in tl.static_range(C):
        total = tl.zeros([TOKENS, KEPT], SUM)
        for s in tl.static_range(R):
            mixed = tl.zeros([TOKENS, KEPT], SUM)
            for r in tl.static_range(R):
                core = tl.load(cores + ((c * H + head) * R + r) * R + s).to(SUM)
                mixed += tl.load(row + r * of_rank, mask=there, other=0).to(SUM) * core
            total += mixed * tl.load(column + s * of_rank, mask=there, other=0).to(SUM)
        tl.store(out + at * C + c, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def tucker_entry_gradients_kernel(
    kept,
    cores,
    gradient,
    of_entries,
    of_cores,
    T,
    H,
    K,
    C: tl.constexpr,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
    KEPT: tl.constexpr,
    SUM: tl.constexpr,
):
    """Gradients of each entry's row and column scores, [2, R, T, H, K], and of the cores by tiles of tokens,
    [tiles, C, H, R, R]; the grid is (tiles of tokens, H)."""
    head = tl.program_id(1)
    at, there, per_rank = _tile(T, H, K, TOKENS, KEPT)
    rows, columns = kept + at, kept + R * per_rank + at
    part = of_cores + (tl.program_id(0).to(tl.int64) * C * H + head) * R * R
    for r in tl.static_range(R):
        of_row = tl.zeros([TOKENS, KEPT], SUM)
        of_column = tl.zeros([TOKENS, KEPT], SUM)
        own = tl.load(rows + r * per_rank, mask=there, other=0).to(SUM)
        for s in tl.static_range(R):
            by_row = tl.load(rows + s * per_rank, mask=there, other=0).to(SUM)
            by_column = tl.load(columns + s * per_rank, mask=there, other=0).to(SUM)
            for c in tl.static_range(C):
                of_out = tl.load(gradient + at * C + c, mask=there, other=0).to(SUM)
                of_row += of_out * by_column * tl.load(cores + ((c * H + head) * R + r) * R + s).to(SUM)
                of_column += of_out * by_row * tl.load(cores + ((c * H + head) * R + s) * R + r).to(SUM)
                of_core = tl.sum(tl.sum(of_out * own * by_column, axis=1), axis=0)
                tl.store(part + c * H * R * R + r * R + s, of_core)
        tl.store(of_entries + r * per_rank + at, of_row, mask=there)
        tl.store(of_entries + (R + r) * per_rank + at, of_column, mask=there)


@triton.jit
def sum_of_equal_keys_kernel(
    of_entries,
    entries,
    of_scores,
    T,
    H,
    K,
    of_side,
    of_token,
    of_head,
    of_key,
    of_rank,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
):
    """The gradient of scores, which are zero where no entry is: the sum over the entries of a key, which the first of them
    writes. The grid is (T, H, sides x blocks of entries).

    A thread has an entry, and goes through all of the list: what it compares and adds is in its own registers.
    """
    num_blocks = tl.cdiv(K, BLOCK)
    side, block = tl.program_id(2) // num_blocks, tl.program_id(2) % num_blocks
    head, token = tl.program_id(1), tl.program_id(0).to(tl.int64)
    start = (token * H + head) * K
    per_rank = tl.cast(T, tl.int64) * H * K
    ids = entries + side * per_rank + start
    own = block * BLOCK + tl.arange(0, BLOCK)
    there = own < K
    key = tl.load(ids + own, mask=there, other=-1).to(tl.int32)
    earlier = tl.zeros([BLOCK], tl.int32)
    where = of_scores + side * of_side + token * of_token + head * of_head + key.to(tl.int64) * of_key
    # A pass over the others for each r: their gradients lie in the cache, and the sums of one r in registers.
    for r in tl.static_range(R):
        total = tl.zeros([BLOCK], SUM)
        for first in range(0, K, BLOCK):
            other = first + tl.arange(0, BLOCK)
            also = other < K
            equal = tl.load(ids + other, mask=also, other=-2).to(tl.int32)[:, None] == key[None, :]
            terms = tl.load(of_entries + (side * R + r) * per_rank + start + other, mask=also, other=0)
            total += tl.sum(tl.where(equal, terms[:, None], 0), axis=0)
            if r == 0:
                before = equal & (other[:, None] < own[None, :])
                earlier += tl.sum(before.to(tl.int32), axis=0)
        tl.store(where + r * of_rank, total.to(of_scores.dtype.element_ty), mask=there & (earlier == 0))


@triton.jit
def _tile(T, H, K, TOKENS: tl.constexpr, KEPT: tl.constexpr):
    """Numbers of a tile's entries in [T, H, K], a mask of them, and T H K; the grid is (tiles of tokens, H)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    k = tl.arange(0, KEPT)[None, :]
    return (token * H + tl.program_id(1)) * K + k, (token < T) & (k < K), tl.cast(T, tl.int64) * H * K


def tucker_scores(scores: Tensor, cores: Tensor, entries: Tensor) -> Tensor:
    """The function of `kernels.tucker_scores.naive.tucker_scores`, with its gradients.

    Backward keeps the scores of the entries, and not those of all keys.
    """
    if not needs_gradient(scores, cores):
        return _scores(scores, cores, entries)[0]
    out: Tensor = _TuckerScores.apply(scores, cores, entries)
    return out


class _TuckerScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, cores: Tensor, entries: Tensor) -> Tensor:
        out, kept = _scores(scores, cores, entries)
        ctx.save_for_backward(kept, cores, entries)
        ctx.shape, ctx.strides = scores.shape, scores.stride()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        kept, cores, entries = ctx.saved_tensors
        return *_gradients(kept, cores, entries, grads[0], ctx.shape, ctx.strides), None


def _results(scores: Tensor, cores: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    return empty_result(scores, cores, entries), scores.new_empty(2, cores.shape[3], *entries.shape[1:])


@custom_op("triton_tucker_scores", _results)
def _scores(scores: Tensor, cores: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    cores, entries = cores.contiguous(), entries.contiguous()
    out, kept = _results(scores, cores, entries)
    if out.numel():
        _, tokens, heads, top_k = entries.shape
        num_cores, _, _, rank = cores.shape
        grid, constants, num_warps = _plan(tokens, heads, top_k, num_cores, rank, cores.dtype)
        with on_device_of(scores):
            tucker_scores_kernel[grid](
                *(scores, cores, entries, out, kept, tokens, heads, top_k, *scores.stride()),
                *constants,
                num_warps=num_warps,
            )
    return out, kept


@cache
def _plan(
    tokens: int, heads: int, top_k: int, num_cores: int, rank: int, dtype: torch.dtype
) -> tuple[tuple[int, int], tuple[Any, ...], int]:
    """The grid of kernels by tiles of tokens, their constants, and their warps."""
    tile = list_tile(top_k)
    constants = (num_cores, rank, tile.lists, tile.entries, sum_dtype(dtype))
    return (-(-tokens // tile.lists), heads), constants, tile.num_warps


def _empty_gradients(
    kept: Tensor, cores: Tensor, entries: Tensor, gradient: Tensor, shape: list[int], strides: list[int]
) -> tuple[Tensor, Tensor]:
    of_scores = kept.new_empty_strided(shape, strides)
    return of_scores, torch.empty_like(cores, memory_format=torch.contiguous_format)


@custom_op("triton_tucker_scores_gradients", _empty_gradients)
def _gradients(
    kept: Tensor, cores: Tensor, entries: Tensor, gradient: Tensor, shape: list[int], strides: list[int]
) -> tuple[Tensor, Tensor]:
    cores, entries, gradient = cores.contiguous(), entries.contiguous(), gradient.contiguous()
    of_scores = kept.new_zeros(_spanned(tuple(shape), tuple(strides))).as_strided(shape, strides)
    if gradient.numel() == 0:
        return of_scores, torch.zeros_like(cores)
    _, tokens, heads, top_k = entries.shape
    num_cores, _, _, rank = cores.shape
    grid, constants, num_warps = _plan(tokens, heads, top_k, num_cores, rank, cores.dtype)
    of_entries = cores.new_empty(2, rank, tokens, heads, top_k)
    of_cores = cores.new_empty(grid[0], *cores.shape)
    with on_device_of(kept):
        tucker_entry_gradients_kernel[grid](
            *(kept, cores, gradient, of_entries, of_cores, tokens, heads, top_k), *constants, num_warps=num_warps
        )
        block = _block(top_k)
        sum_of_equal_keys_kernel[(tokens, heads, 2 * -(-top_k // block))](
            *(of_entries, entries, of_scores, tokens, heads, top_k, *strides, rank, block, sum_dtype(cores.dtype)),
            num_warps=1,
        )
    return of_scores, of_cores.sum(0)


@cache
def _block(top_k: int) -> int:
    """Entries that a program of `sum_of_equal_keys_kernel` has."""
    return min(_COMPARED, list_tile(top_k).entries)


@cache
def _spanned(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements of the memory that scores take, with the gaps behind rows, the last one's too: products with keys count on
    zeros there."""
    if not math.prod(shape):
        return 0
    return max((size * stride for size, stride in zip(shape, strides, strict=True)), default=0)
