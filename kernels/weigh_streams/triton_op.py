"""`weigh_streams` in Triton: a launch each way, which reads and writes everything once.

Forward, a program has a tile of columns of a token; backward it has the whole token, so that it makes the sums over columns
alone. Launches are custom ops of PyTorch; nothing waits for the device.

Legend: T tokens, n streams, D columns.
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
from kernels.common.tiles import streams_tile
from kernels.weigh_streams.op import empty_result


@triton.jit
def weigh_streams_kernel(
    streams, weights, result, D: tl.constexpr, n: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """The grid is (T, tiles of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < D
    total = tl.zeros([COLUMNS], WIDE)
    for i in tl.static_range(n):
        stream = tl.load(streams + (token * n + i) * D + column, mask=there, other=0).to(WIDE)
        total += tl.load(weights + token * n + i).to(WIDE) * stream
    tl.store(result + token * D + column, total.to(result.dtype.element_ty), mask=there)


@triton.jit
def weigh_streams_gradients_kernel(
    gradient,
    streams,
    weights,
    of_streams,
    of_weights,
    D: tl.constexpr,
    n: tl.constexpr,
    SIDE: tl.constexpr,
    LANES: tl.constexpr,
    PER_LANE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradients of streams and weights. The grid is (T,).

    A lane is what one load brings; sums over lanes are made once per token.
    """
    token, read = tl.program_id(0).to(tl.int64), tl.arange(0, SIDE)
    is_stream = read < n
    sums = tl.zeros([LANES, SIDE], WIDE)
    lane = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    for first in range(0, D, LANES * PER_LANE):
        column = first + lane
        there = column < D
        grad = tl.load(gradient + token * D + column, mask=there, other=0).to(WIDE)
        for i in tl.static_range(n):
            at = (token * n + i) * D + column
            stream = tl.load(streams + at, mask=there, other=0).to(WIDE)
            sums += tl.where(read[None, :] == i, tl.sum(stream * grad, 1)[:, None], 0)
            weight = tl.load(weights + token * n + i).to(WIDE)
            tl.store(of_streams + at, (weight * grad).to(of_streams.dtype.element_ty), mask=there)
    tl.store(of_weights + token * n + read, tl.sum(sums, 0).to(of_weights.dtype.element_ty), mask=is_stream)


@cache
def _plan(width: int, n: int, dtype: torch.dtype) -> tuple[int, tuple[Any, ...], tuple[Any, ...], int]:
    """Tiles of columns, the constants of both kernels, and their warps."""
    tile, wide = streams_tile(width, n, dtype.itemsize), sum_dtype(dtype)
    backward = (width, n, tile.side, tile.lanes, tile.per_lane, wide)
    return -(-width // tile.columns), (width, n, tile.columns, wide), backward, tile.num_warps


@custom_op("triton_weigh_streams", empty_result)
def _weigh_streams(streams: Tensor, weights: Tensor) -> Tensor:
    result, (n, width) = empty_result(streams, weights), streams.shape[-2:]
    if num_tokens := result.numel() // width:
        num_tiles, constants, _, num_warps = _plan(width, n, streams.dtype)
        with on_device_of(streams):
            weigh_streams_kernel[(num_tokens, num_tiles)](
                *(streams.contiguous(), weights.contiguous(), result), *constants, num_warps=num_warps
            )
    return result


def _empty_gradients(gradient: Tensor, streams: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return streams.new_empty(streams.shape), weights.new_empty(weights.shape)


@custom_op("triton_weigh_streams_gradients", _empty_gradients)
def _gradients(gradient: Tensor, streams: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of streams and weights."""
    found, (n, width) = _empty_gradients(gradient, streams, weights), streams.shape[-2:]
    if num_tokens := gradient.numel() // width:
        _, _, constants, num_warps = _plan(width, n, streams.dtype)
        operands = [each.contiguous() for each in (gradient, streams, weights)]
        with on_device_of(streams):
            weigh_streams_gradients_kernel[(num_tokens,)](*operands, *found, *constants, num_warps=num_warps)
    return found


class _WeighStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(streams, weights)
        return _weigh_streams(streams, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return _gradients(grads[0], *ctx.saved_tensors)


def weigh_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """The function of `kernels.weigh_streams.naive.weigh_streams`."""
    if not needs_gradient(streams, weights):
        return _weigh_streams(streams, weights)
    out: Tensor = _WeighStreams.apply(streams, weights)
    return out
