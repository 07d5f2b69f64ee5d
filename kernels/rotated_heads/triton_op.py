"""`rotated_heads` in Triton: one launch each way for query and key heads, which are read once and written once.

Backward computes the norm again, from the heads as they came and a number per head. Launches are custom ops of PyTorch;
nothing waits for the device.

Legend: s tokens of a sequence, b sequences, n query heads, g key heads, d columns of a head, of which the first r turn;
P programs that add up gradients of gains. A row is a head of a token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.ops import custom_op, needs_gradient
from kernels.common.tiles import gain_programs, heads_tile
from kernels.rotated_heads.op import empty_result


@triton.jit
def _rows(tile, num_rows, num_sequences, N: tl.constexpr, ROWS: tl.constexpr):
    """Numbers of a tile's rows, which of them there are, and their places in the sequence, sequences and heads."""
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // N
    s, b = token // num_sequences, token % num_sequences
    return row.to(tl.int64), row < num_rows, s.to(tl.int64), b.to(tl.int64), (row % N).to(tl.int64)


@triton.jit
def _columns(rows, place, present, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr):
    """Columns from FIRST on, of rows that begin at `place`."""
    column = tl.arange(0, PADDED)[None, :]
    return tl.load(rows + place[:, None] + FIRST + column, mask=present[:, None] & (column < COUNT), other=0).to(WIDE)


@triton.jit
def _store(out, place, present, values, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)[None, :]
    there = present[:, None] & (column < COUNT)
    tl.store(out + place[:, None] + FIRST + column, values.to(out.dtype.element_ty), mask=there)


@triton.jit
def _gain(gain, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr):
    column = tl.arange(0, PADDED)[None, :]
    return tl.load(gain + FIRST + column, mask=column < COUNT, other=0).to(WIDE)


@triton.jit
def _turn(
    tile,
    heads,
    heads_s,
    heads_b,
    heads_n,
    out,
    scales,
    gain,
    turns,
    turns_s,
    turns_b,
    num_rows,
    num_sequences,
    epsilon,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The forward pass of a tile of heads."""
    row, present, s, b, n = _rows(tile, num_rows, num_sequences, N, ROWS)
    place, table = s * heads_s + b * heads_b + n * heads_n, s * turns_s + b * turns_b
    first = _columns(heads, place, present, 0, R // 2, HALF, WIDE)
    second = _columns(heads, place, present, R // 2, R // 2, HALF, WIDE)
    if REST:
        rest = _columns(heads, place, present, R, D - R, REST, WIDE)
    cos = _columns(turns, table, present, 0, R // 2, HALF, WIDE)
    sin = _columns(turns, table, present, R, R // 2, HALF, WIDE)
    if NORM:
        squares = tl.sum(first * first + second * second, 1)
        if REST:
            squares += tl.sum(rest * rest, 1)
        scale = 1 / tl.sqrt(squares / D + epsilon)
        tl.store(scales + row, scale, mask=present)
        first *= scale[:, None] * _gain(gain, 0, R // 2, HALF, WIDE)
        second *= scale[:, None] * _gain(gain, R // 2, R // 2, HALF, WIDE)
        if REST:
            rest *= scale[:, None] * _gain(gain, R, D - R, REST, WIDE)
    _store(out, row * D, present, first * cos - second * sin, 0, R // 2, HALF)
    _store(out, row * D, present, second * cos + first * sin, R // 2, R // 2, HALF)
    if REST:
        _store(out, row * D, present, rest, R, D - R, REST)


@triton.jit(do_not_specialize=["query_rows", "key_rows", "num_sequences"])
def rotated_heads_kernel(
    query,
    query_s,
    query_b,
    query_n,
    key,
    key_s,
    key_b,
    key_n,
    turned_query,
    turned_key,
    scales,
    query_gain,
    key_gain,
    turns,
    turns_s,
    turns_b,
    query_rows,
    key_rows,
    num_sequences,
    epsilon,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Turned heads as in `naive.rotated_heads`, and with gains scales[row] = 1 / sqrt(mean(x^2) + epsilon).

    The grid is (tiles of query heads + tiles of key heads,).
    """
    tile, query_tiles = tl.program_id(0), tl.cdiv(query_rows, ROWS)
    if tile < query_tiles:
        _turn(
            *(tile, query, query_s, query_b, query_n, turned_query, scales, query_gain, turns, turns_s, turns_b),
            *(query_rows, num_sequences, epsilon, QUERY_HEADS, D, R, HALF, REST, ROWS, NORM, WIDE),
        )
    else:
        _turn(
            *(tile - query_tiles, key, key_s, key_b, key_n, turned_key, scales + query_rows, key_gain),
            *(turns, turns_s, turns_b),
            *(key_rows, num_sequences, epsilon, KEY_HEADS, D, R, HALF, REST, ROWS, NORM, WIDE),
        )


@triton.jit
def _turn_back(
    program,
    grad,
    grad_s,
    grad_b,
    grad_n,
    heads,
    heads_s,
    heads_b,
    heads_n,
    out,
    scales,
    gain,
    of_gain,
    turns,
    turns_s,
    turns_b,
    num_rows,
    num_sequences,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The backward pass of every P-th tile of heads, and their sum of the gain's gradient."""
    if NORM:
        first_gain = _gain(gain, 0, R // 2, HALF, WIDE)
        second_gain = _gain(gain, R // 2, R // 2, HALF, WIDE)
        first_sum, second_sum = tl.zeros([ROWS, HALF], WIDE), tl.zeros([ROWS, HALF], WIDE)
        if REST:
            rest_gain = _gain(gain, R, D - R, REST, WIDE)
            rest_sum = tl.zeros([ROWS, REST], WIDE)
    for tile in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row, present, s, b, n = _rows(tile, num_rows, num_sequences, N, ROWS)
        place, table = s * grad_s + b * grad_b + n * grad_n, s * turns_s + b * turns_b
        of_first = _columns(grad, place, present, 0, R // 2, HALF, WIDE)
        of_second = _columns(grad, place, present, R // 2, R // 2, HALF, WIDE)
        cos = _columns(turns, table, present, 0, R // 2, HALF, WIDE)
        sin = _columns(turns, table, present, R, R // 2, HALF, WIDE)
        if REST:
            rest = _columns(grad, place, present, R, D - R, REST, WIDE)
        first, second = of_first * cos + of_second * sin, of_second * cos - of_first * sin
        if NORM:
            own = s * heads_s + b * heads_b + n * heads_n
            scale = tl.load(scales + row, mask=present, other=0)[:, None]
            first_normal = _columns(heads, own, present, 0, R // 2, HALF, WIDE) * scale
            second_normal = _columns(heads, own, present, R // 2, R // 2, HALF, WIDE) * scale
            first_sum += first * first_normal
            second_sum += second * second_normal
            first *= first_gain
            second *= second_gain
            along = tl.sum(first * first_normal + second * second_normal, 1)
            if REST:
                rest_normal = _columns(heads, own, present, R, D - R, REST, WIDE) * scale
                rest_sum += rest * rest_normal
                rest *= rest_gain
                along += tl.sum(rest * rest_normal, 1)
            along = along[:, None] / D
            first = scale * (first - first_normal * along)
            second = scale * (second - second_normal * along)
            if REST:
                rest = scale * (rest - rest_normal * along)
        _store(out, row * D, present, first, 0, R // 2, HALF)
        _store(out, row * D, present, second, R // 2, R // 2, HALF)
        if REST:
            _store(out, row * D, present, rest, R, D - R, REST)
    if NORM:
        # Of this program and the other kind of heads, one after the other.
        at = of_gain + tl.program_id(0).to(tl.int64) * (2 * D)
        half = tl.arange(0, HALF)
        tl.store(at + half, tl.sum(first_sum, 0), mask=half < R // 2)
        tl.store(at + R // 2 + half, tl.sum(second_sum, 0), mask=half < R // 2)
        if REST:
            column = tl.arange(0, REST)
            tl.store(at + R + column, tl.sum(rest_sum, 0), mask=column < D - R)


@triton.jit(do_not_specialize=["query_rows", "key_rows", "num_sequences"])
def rotated_heads_gradients_kernel(
    of_query,
    of_query_s,
    of_query_b,
    of_query_n,
    of_key,
    of_key_s,
    of_key_b,
    of_key_n,
    query,
    query_s,
    query_b,
    query_n,
    key,
    key_s,
    key_b,
    key_n,
    query_gradient,
    key_gradient,
    scales,
    query_gain,
    key_gain,
    gain_gradients,
    turns,
    turns_s,
    turns_b,
    query_rows,
    key_rows,
    num_sequences,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradients of query and key heads, and each program's sums of both gains' gradients.

    With dy the gradient turned back, n = x r and r the scale: dx = r (g dy - n mean(g dy n)), dg = sum over rows of dy n.
    The grid is (P,). The last programs begin with the keys, so that they have as many tiles as the first ones.
    """
    _turn_back(
        *(tl.program_id(0), of_query, of_query_s, of_query_b, of_query_n, query, query_s, query_b, query_n),
        *(query_gradient, scales, query_gain, gain_gradients, turns, turns_s, turns_b, query_rows, num_sequences),
        *(QUERY_HEADS, D, R, HALF, REST, ROWS, NORM, WIDE),
    )
    _turn_back(
        *(tl.num_programs(0) - 1 - tl.program_id(0), of_key, of_key_s, of_key_b, of_key_n, key, key_s, key_b, key_n),
        *(key_gradient, scales + query_rows, key_gain, gain_gradients + D, turns, turns_s, turns_b),
        *(key_rows, num_sequences, KEY_HEADS, D, R, HALF, REST, ROWS, NORM, WIDE),
    )


@cache
def _plan(
    query_rows: int,
    key_rows: int,
    query_heads: int,
    key_heads: int,
    width: int,
    turning: int,
    has_norm: bool,
    dtype: torch.dtype,
) -> tuple[int, tuple[Any, ...], int]:
    """Tiles of query and key heads, the constants of both kernels, and their warps."""
    tile = heads_tile(width, turning)
    shape = (query_heads, key_heads, width, turning, tile.half, tile.rest, tile.rows)
    num_tiles = -(-query_rows // tile.rows) - (-key_rows // tile.rows)
    return num_tiles, (*shape, has_norm, sum_dtype(dtype)), tile.num_warps


def _rows_of(heads: Tensor) -> tuple[Tensor, int, int, int]:
    """Heads whose columns are neighbours, and their strides, which are any."""
    if heads.stride(3) != 1:
        heads = heads.contiguous()
    of_token, of_sequence, of_head, _ = heads.stride()
    return heads, of_token, of_sequence, of_head


def _strides_of(turns: Tensor) -> tuple[int, int]:
    """Elements between tokens and between sequences, which may share their angles."""
    return turns.stride(0), turns.stride(1) if turns.shape[1] > 1 else 0


SCHEMA = (
    "(Tensor query, Tensor key, Tensor turns, Tensor? query_gain, Tensor? key_gain, float epsilon)"
    " -> (Tensor, Tensor, Tensor)"
)
"""Signature of the custom op, which also returns the scales, one for each query and then for each key; none without gains."""


def _empty(
    query: Tensor,
    key: Tensor,
    turns: Tensor,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_scales = 0 if query_gain is None else (query.numel() + key.numel()) // query.shape[3]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return *empty_result(query, key, turns, query_gain, key_gain, epsilon), query.new_empty(num_scales, dtype=wide)


@custom_op("triton_rotated_heads", _empty, schema=SCHEMA)
def _rotated_heads(
    query: Tensor,
    key: Tensor,
    turns: Tensor,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    empty = _empty(query, key, turns, query_gain, key_gain, epsilon)
    num_tokens, num_sequences, query_heads, width = query.shape
    key_heads = key.shape[2]
    query_rows, key_rows = (num_tokens * num_sequences * heads for heads in (query_heads, key_heads))
    if query_rows:
        num_tiles, constants, num_warps = _plan(
            *(query_rows, key_rows, query_heads, key_heads, width, turns.shape[3], query_gain is not None, query.dtype)
        )
        with on_device_of(query):
            rotated_heads_kernel[(num_tiles,)](
                *(*_rows_of(query), *_rows_of(key), *empty, query_gain, key_gain, turns, *_strides_of(turns)),
                *(query_rows, key_rows, num_sequences, epsilon),
                *constants,
                num_warps=num_warps,
            )
    return empty


def _empty_gradients(
    of_query: Tensor,
    of_key: Tensor,
    query: Tensor,
    key: Tensor,
    turns: Tensor,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    scales: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    width = query.shape[3]
    programs = 0 if query_gain is None else _programs(query, key, turns)
    return query.new_empty(query.shape), key.new_empty(key.shape), scales.new_empty(programs, 2, width)


def _programs(query: Tensor, key: Tensor, turns: Tensor) -> int:
    """P."""
    rows = query.shape[3] * heads_tile(query.shape[3], turns.shape[3]).rows
    return gain_programs(-(-query.numel() // rows) - (-key.numel() // rows))


@custom_op("triton_rotated_heads_gradients", _empty_gradients)
def _gradients(
    of_query: Tensor,
    of_key: Tensor,
    query: Tensor,
    key: Tensor,
    turns: Tensor,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    scales: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query and key heads, and of both gains [P, 2, d], yet to be added up; P is 0 without gains."""
    num_tokens, num_sequences, query_heads, width = query.shape
    key_heads = key.shape[2]
    query_rows, key_rows = (num_tokens * num_sequences * heads for heads in (query_heads, key_heads))
    num_tiles, constants, num_warps = _plan(
        *(query_rows, key_rows, query_heads, key_heads, width, turns.shape[3], query_gain is not None, query.dtype)
    )
    programs = gain_programs(num_tiles)
    query_gradient = torch.empty_like(query, memory_format=torch.contiguous_format)
    key_gradient = torch.empty_like(key, memory_format=torch.contiguous_format)
    of_gains = scales.new_empty(0 if query_gain is None else programs, 2, width)
    if query_rows:
        with on_device_of(query):
            rotated_heads_gradients_kernel[(programs,)](
                *(*_rows_of(of_query), *_rows_of(of_key), *_rows_of(query), *_rows_of(key)),
                *(query_gradient, key_gradient, scales, query_gain, key_gain, of_gains, turns, *_strides_of(turns)),
                *(query_rows, key_rows, num_sequences),
                *constants,
                num_warps=num_warps,
            )
    return query_gradient, key_gradient, of_gains


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        turns: Tensor,
        query_gain: Tensor | None,
        key_gain: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        turned_query, turned_key, scales = _rotated_heads(query, key, turns, query_gain, key_gain, epsilon)
        # Without a norm the gradient is the same whatever the heads are.
        heads = (None, None) if query_gain is None else (query, key)
        ctx.save_for_backward(*heads, turns, query_gain, key_gain, scales)
        return turned_query, turned_key

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_query, of_key = grads
        query, key, turns, query_gain, key_gain, scales = ctx.saved_tensors
        if query_gain is None:
            of_query, of_key, _ = _gradients(of_query, of_key, of_query, of_key, turns, None, None, scales)
            return of_query, of_key, None, None, None, None
        of_query, of_key, of_gains = _gradients(of_query, of_key, query, key, turns, query_gain, key_gain, scales)
        of_query_gain, of_key_gain = of_gains.sum(0).to(query_gain.dtype).unbind(0)
        return of_query, of_key, None, of_query_gain, of_key_gain, None


def rotated_heads(
    query: Tensor,
    key: Tensor,
    turns: Tensor,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The function of `kernels.rotated_heads.naive.rotated_heads`."""
    if not needs_gradient(query, key, *(() if query_gain is None or key_gain is None else (query_gain, key_gain))):
        return _rotated_heads(query, key, turns, query_gain, key_gain, epsilon)[:2]
    out: tuple[Tensor, Tensor] = _RotatedHeads.apply(query, key, turns, query_gain, key_gain, epsilon)
    return out
