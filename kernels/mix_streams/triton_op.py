"""`mix_streams` in Triton: a launch each way, which reads and writes everything once.

Forward, a program has a tile of columns of a token; backward it has the whole token, so that it makes the sums over columns
alone. Launches are custom ops of PyTorch; nothing waits for the device.

Legend: T tokens, n streams, D columns. i is the stream that is read, j the one that is written.
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
from kernels.common.tiles import mixing_tile, streams_tile
from kernels.mix_streams.op import empty_result


@triton.jit
def mix_streams_kernel(
    streams,
    out,
    post,
    mix,
    result,
    D: tl.constexpr,
    n: tl.constexpr,
    SIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MIXES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The grid is (T, tiles of columns)."""
    token, written = tl.program_id(0).to(tl.int64), tl.arange(0, SIDE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, is_stream = column < D, written < n
    own = (token * n + written)[:, None] * D + column[None, :]
    own_there = is_stream[:, None] & there[None, :]
    weight = tl.load(post + token * n + written, mask=is_stream, other=0).to(WIDE)
    mixed = weight[:, None] * tl.load(out + token * D + column, mask=there, other=0).to(WIDE)[None, :]
    if MIXES:
        for read in tl.static_range(n):
            stream = tl.load(streams + (token * n + read) * D + column, mask=there, other=0).to(WIDE)
            weight = tl.load(mix + (token * n + read) * n + written, mask=is_stream, other=0).to(WIDE)
            mixed += weight[:, None] * stream[None, :]
    else:
        mixed += tl.load(streams + own, mask=own_there, other=0).to(WIDE)
    tl.store(result + own, mixed.to(result.dtype.element_ty), mask=own_there)


@triton.jit
def mix_streams_gradients_kernel(
    gradient,
    streams,
    out,
    post,
    mix,
    of_streams,
    of_out,
    of_post,
    of_mix,
    D: tl.constexpr,
    n: tl.constexpr,
    SIDE: tl.constexpr,
    LANES: tl.constexpr,
    PER_LANE: tl.constexpr,
    MIXES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradients of streams, output, post and mix; of output and post alone where nothing is mixed. The grid is (T,).

    A lane is what one load brings; sums over lanes are made once per token.
    """
    token, written = tl.program_id(0).to(tl.int64), tl.arange(0, SIDE)
    is_stream = written < n
    weight = tl.load(post + token * n + written, mask=is_stream, other=0).to(WIDE)[:, None, None]
    post_sums = tl.zeros([SIDE, LANES], WIDE)
    read = tl.arange(0, SIDE)[None, None, :]
    if MIXES:
        mix_sums = tl.zeros([SIDE, LANES, SIDE], WIDE)
    lane = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    for first in range(0, D, LANES * PER_LANE):
        column = first + lane
        there = column < D
        at = (token * n + written)[:, None, None] * D + column[None, :, :]
        grad = tl.load(gradient + at, mask=is_stream[:, None, None] & there[None, :, :], other=0).to(WIDE)
        value = tl.load(out + token * D + column, mask=there, other=0).to(WIDE)
        tl.store(of_out + token * D + column, tl.sum(weight * grad, 0).to(of_out.dtype.element_ty), mask=there)
        post_sums += tl.sum(grad * value[None, :, :], 2)
        if MIXES:
            for i in tl.static_range(n):
                place = (token * n + i) * D + column
                stream = tl.load(streams + place, mask=there, other=0).to(WIDE)
                mix_sums += tl.where(read == i, tl.sum(grad * stream[None, :, :], 2)[:, :, None], 0)
                row = tl.load(mix + (token * n + i) * n + written, mask=is_stream, other=0).to(WIDE)
                back = tl.sum(row[:, None, None] * grad, 0)
                tl.store(of_streams + place, back.to(of_streams.dtype.element_ty), mask=there)
    tl.store(of_post + token * n + written, tl.sum(post_sums, 1).to(of_post.dtype.element_ty), mask=is_stream)
    if MIXES:
        at = token * (n * n) + tl.arange(0, SIDE)[None, :] * n + written[:, None]
        sums = tl.sum(mix_sums, 1).to(of_mix.dtype.element_ty)
        tl.store(of_mix + at, sums, mask=is_stream[:, None] & (tl.arange(0, SIDE) < n)[None, :])


SCHEMA = "(Tensor streams, Tensor out, Tensor post, Tensor? mix) -> Tensor"
SCHEMA_OF_GRADIENTS = (
    "(Tensor gradient, Tensor? streams, Tensor out, Tensor post, Tensor? mix) -> (Tensor, Tensor, Tensor, Tensor)"
)


@cache
def _plan(width: int, n: int, dtype: torch.dtype, mixes: bool) -> tuple[int, tuple[Any, ...], int]:
    """Tiles of columns of the kernel forward, its constants, and its warps."""
    tile = streams_tile(width, n, dtype.itemsize)
    constants = (width, n, tile.side, tile.columns, mixes, sum_dtype(dtype))
    return -(-width // tile.columns), constants, tile.num_warps


@cache
def _plan_of_gradients(width: int, n: int, dtype: torch.dtype, mixes: bool) -> tuple[tuple[Any, ...], int]:
    """Constants of the kernel backward, and its warps."""
    tile = mixing_tile(width, n, dtype.itemsize)
    return (width, n, tile.side, tile.lanes, tile.per_lane, mixes, sum_dtype(dtype)), tile.num_warps


@custom_op("triton_mix_streams", empty_result, schema=SCHEMA)
def _mix_streams(streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> Tensor:
    result, (n, width) = empty_result(streams, out, post, mix), streams.shape[-2:]
    if num_tokens := out.numel() // width:
        num_tiles, constants, num_warps = _plan(width, n, streams.dtype, mix is not None)
        operands = [None if each is None else each.contiguous() for each in (streams, out, post, mix)]
        with on_device_of(streams):
            mix_streams_kernel[(num_tokens, num_tiles)](*operands, result, *constants, num_warps=num_warps)
    return result


def _empty_gradients(
    gradient: Tensor, streams: Tensor | None, out: Tensor, post: Tensor, mix: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_streams = gradient.new_empty(0 if streams is None else gradient.shape)
    of_mix = post.new_empty(0) if mix is None else mix.new_empty(mix.shape)
    return of_streams, out.new_empty(out.shape), post.new_empty(post.shape), of_mix


@custom_op("triton_mix_streams_gradients", _empty_gradients, schema=SCHEMA_OF_GRADIENTS)
def _gradients(
    gradient: Tensor, streams: Tensor | None, out: Tensor, post: Tensor, mix: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of streams, output, post and mix; without a mix the first and the last are empty."""
    found, (n, width) = _empty_gradients(gradient, streams, out, post, mix), gradient.shape[-2:]
    if num_tokens := out.numel() // width:
        constants, num_warps = _plan_of_gradients(width, n, gradient.dtype, mix is not None)
        operands = [None if each is None else each.contiguous() for each in (gradient, streams, out, post, mix)]
        with on_device_of(gradient):
            mix_streams_gradients_kernel[(num_tokens,)](*operands, *found, *constants, num_warps=num_warps)
    return found


class _MixStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> Tensor:
        # Without mixing backward has no use for the streams.
        ctx.save_for_backward(None if mix is None else streams, out, post, mix)
        return _mix_streams(streams, out, post, mix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        streams, out, post, mix = ctx.saved_tensors
        if mix is None and not any(ctx.needs_input_grad[1:]):
            return grads[0], None, None, None
        of_streams, of_out, of_post, of_mix = _gradients(grads[0], streams, out, post, mix)
        return (grads[0], of_out, of_post, None) if mix is None else (of_streams, of_out, of_post, of_mix)


def mix_streams(streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> Tensor:
    """The function of `kernels.mix_streams.naive.mix_streams`."""
    if not needs_gradient(*((streams, out, post) if mix is None else (streams, out, post, mix))):
        return _mix_streams(streams, out, post, mix)
    result: Tensor = _MixStreams.apply(streams, out, post, mix)
    return result
