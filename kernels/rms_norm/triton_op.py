"""`rms_norm` in Triton: a program has whole rows in registers, which are read once and written once each way.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: D columns; P programs that add up the gain's gradient.
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
from kernels.common.tiles import MAX_NORM_COLUMNS, gain_programs, norm_tile
from kernels.rms_norm.op import torch_rms_norm


@triton.jit
def _load(x, outer_stride, inner_stride, num_inner, row, there, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows at two strides: the row i num_inner + j begins at i outer_stride + j inner_stride."""
    place = (row // num_inner).to(tl.int64) * outer_stride + (row % num_inner).to(tl.int64) * inner_stride
    return tl.load(x + place[:, None] + tl.arange(0, COLUMNS)[None, :], mask=there, other=0)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,
    x_outer,
    x_inner,
    num_inner,
    gain,
    out,
    scales,
    num_rows,
    epsilon,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out = x scale gain, with scales[row] = 1 / sqrt(mean(x^2) + epsilon). The grid is (tiles of ROWS rows,)."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    present = row < num_rows
    there = present[:, None] & (column < D)[None, :]
    values = _load(x, x_outer, x_inner, num_inner, row, there, D, COLUMNS).to(WIDE)
    scale = 1 / tl.sqrt(tl.sum(values * values, 1) / D + epsilon)
    tl.store(scales + row, scale, mask=present)
    values *= scale[:, None] * tl.load(gain + column, mask=column < D, other=0).to(WIDE)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * D + column[None, :], values.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_gradients_kernel(
    grad,
    grad_outer,
    grad_inner,
    num_grad_inner,
    x,
    x_outer,
    x_inner,
    num_inner,
    gain,
    scales,
    gradient,
    gain_gradients,
    num_rows,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradient of `x`, and each program's sum of the gain's gradient [D]: see README.md. The grid is (P,)."""
    column = tl.arange(0, COLUMNS)
    own_gain = tl.load(gain + column, mask=column < D, other=0).to(WIDE)[None, :]
    sums = tl.zeros([ROWS, COLUMNS], WIDE)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        present = row < num_rows
        there = present[:, None] & (column < D)[None, :]
        of_out = _load(grad, grad_outer, grad_inner, num_grad_inner, row, there, D, COLUMNS).to(WIDE)
        values = _load(x, x_outer, x_inner, num_inner, row, there, D, COLUMNS).to(WIDE)
        scale = tl.load(scales + row, mask=present, other=0)[:, None]
        values *= scale
        sums += of_out * values
        of_out *= own_gain
        along = tl.sum(of_out * values, 1)[:, None] / D
        of_out = scale * (of_out - values * along)
        at = gradient + row.to(tl.int64)[:, None] * D + column[None, :]
        tl.store(at, of_out.to(gradient.dtype.element_ty), mask=there)
    tl.store(gain_gradients + tl.program_id(0).to(tl.int64) * D + column, tl.sum(sums, 0), mask=column < D)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Rows at two strides, which a split of a product has: the tensor, both strides, and rows at the inner one.

    Others are copied, and so are rows whose columns are no neighbours.
    """
    if not x.is_contiguous():
        strides = _row_strides(x.shape, x.stride())
        if strides is not None:
            return x, *strides
        x = x.contiguous()
    return x, x.shape[-1], 0, 1


@cache
def _row_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """The outer and the inner stride of rows, and rows at the inner one; None: they have more strides, or no whole rows."""
    if strides[-1] != 1:
        return None
    levels: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    if len(levels) == 1:
        return levels[0][1], 0, 1
    return (levels[0][1], levels[1][1], levels[1][0]) if len(levels) == 2 else None


@cache
def _plan(num_rows: int, width: int, dtype: torch.dtype) -> tuple[int, tuple[Any, ...], int]:
    """Tiles of rows, the kernels' constants, and their warps."""
    tile = norm_tile(width)
    return -(-num_rows // tile.entries), (width, tile.columns, tile.entries, sum_dtype(dtype)), tile.num_warps


def _empty(x: Tensor, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    num_rows = x.numel() // max(1, x.shape[-1])
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(num_rows, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


@custom_op("triton_rms_norm", _empty)
def _rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm, and a scale for each row."""
    out, scales = _empty(x, gain, epsilon)
    if num_rows := scales.numel():
        num_tiles, constants, num_warps = _plan(num_rows, x.shape[-1], x.dtype)
        with on_device_of(x):
            rms_norm_kernel[(num_tiles,)](
                *(*_rows(x), gain, out, scales, num_rows, epsilon), *constants, num_warps=num_warps
            )
    return out, scales


def _empty_gradients(grad: Tensor, x: Tensor, gain: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    programs = gain_programs(-(-scales.numel() // norm_tile(width).entries))
    return torch.empty_like(x, memory_format=torch.contiguous_format), scales.new_empty(programs, width)


@custom_op("triton_rms_norm_gradients", _empty_gradients)
def _gradients(grad: Tensor, x: Tensor, gain: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `x`, and of the gain [P, D], yet to be added up."""
    num_rows, width = scales.numel(), x.shape[-1]
    num_tiles, constants, num_warps = _plan(num_rows, width, x.dtype)
    programs = gain_programs(num_tiles)
    gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    of_gain = scales.new_empty(programs, width)
    if programs:
        with on_device_of(x):
            rms_norm_gradients_kernel[(programs,)](
                *(*_rows(grad), *_rows(x), gain, scales, gradient, of_gain, num_rows), *constants, num_warps=num_warps
            )
    return gradient, of_gain


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        out, scales = _rms_norm(x, gain, epsilon)
        ctx.save_for_backward(x, gain, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, gain, scales = ctx.saved_tensors
        gradient, of_gain = _gradients(grads[0], x, gain, scales)
        return gradient, of_gain.sum(0).to(gain.dtype) if ctx.needs_input_grad[1] else None, None


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """The function of `kernels.rms_norm.naive.rms_norm`; rows that are too wide for a program's registers are PyTorch's."""
    if x.shape[-1] > MAX_NORM_COLUMNS:
        return torch_rms_norm(x, gain, epsilon)
    if not needs_gradient(x, gain):
        return _rms_norm(x, gain, epsilon)[0]
    out: Tensor = _RmsNorm.apply(x, gain, epsilon)
    return out
