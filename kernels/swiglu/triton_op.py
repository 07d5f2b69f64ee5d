"""`swiglu` in Triton: a pass each way.

Legend: T rows, F gates of each, and as many ups.
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
from kernels.common.tiles import columns_of
from kernels.swiglu.op import empty_result

_ELEMENTS = 1024
"""Gates that a program takes, 8 per thread: a load of 16 bytes in bf16."""


@triton.jit
def swiglu_kernel(gate_and_up, out, num_rows, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """out[t, f] = silu(gate[t, f]) up[t, f]; the grid is (tiles of rows, tiles of columns)."""
    rows, columns, there = _tile(num_rows, F, ROWS, COLUMNS)
    at = rows * (2 * F) + columns
    gate = tl.load(gate_and_up + at, mask=there, other=0).to(WIDE)
    up = tl.load(gate_and_up + at + F, mask=there, other=0).to(WIDE)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + rows * F + columns, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def swiglu_gradient_kernel(
    gate_and_up, gradient, out, num_rows, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """The gradients of gates and ups, [T, 2 F], from that of the result [T, F]; the grid is that of the other way."""
    rows, columns, there = _tile(num_rows, F, ROWS, COLUMNS)
    at = rows * (2 * F) + columns
    gate = tl.load(gate_and_up + at, mask=there, other=0).to(WIDE)
    up = tl.load(gate_and_up + at + F, mask=there, other=0).to(WIDE)
    of_out = tl.load(gradient + rows * F + columns, mask=there, other=0).to(WIDE)
    share = 1 / (1 + tl.exp(-gate))
    of_gate = of_out * up * share * (1 + gate * (1 - share))
    tl.store(out + at, of_gate.to(out.dtype.element_ty), mask=there)
    tl.store(out + at + F, (of_out * gate * share).to(out.dtype.element_ty), mask=there)


@triton.jit
def _tile(num_rows, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return rows, columns, (rows < num_rows) & (columns < F)


def swiglu(gate_and_up: Tensor) -> Tensor:
    """The function of `kernels.swiglu.naive.swiglu`, with its gradient."""
    if not needs_gradient(gate_and_up):
        return _swiglu(gate_and_up)
    out: Tensor = _SwiGLU.apply(gate_and_up)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        return _swiglu(gate_and_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        return _gradient(gate_and_up, grads[0])


@custom_op("triton_swiglu", empty_result)
def _swiglu(gate_and_up: Tensor) -> Tensor:
    gate_and_up = gate_and_up.contiguous()
    out = empty_result(gate_and_up)
    _launch(swiglu_kernel, gate_and_up, out)
    return out


def _empty_gradient(gate_and_up: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(gate_and_up, memory_format=torch.contiguous_format)


@custom_op("triton_swiglu_gradient", _empty_gradient)
def _gradient(gate_and_up: Tensor, gradient: Tensor) -> Tensor:
    gate_and_up = gate_and_up.contiguous()
    out = torch.empty_like(gate_and_up)
    _launch(swiglu_gradient_kernel, gate_and_up, gradient.contiguous(), out)
    return out


def _launch(kernel: Any, gate_and_up: Tensor, *others: Tensor) -> None:
    if num_elements := gate_and_up.numel():
        grid, numbers = _plan(num_elements, gate_and_up.shape[-1] // 2, gate_and_up.dtype)
        with on_device_of(gate_and_up):
            kernel[grid](gate_and_up, *others, *numbers, num_warps=4)


@cache
def _plan(num_elements: int, width: int, dtype: torch.dtype) -> tuple[tuple[int, int], tuple[Any, ...]]:
    """The grid, and the kernels' arguments behind the tensors."""
    num_rows, columns = num_elements // (2 * width), min(columns_of(width), _ELEMENTS)
    rows = _ELEMENTS // columns
    return (-(-num_rows // rows), -(-width // columns)), (num_rows, width, rows, columns, sum_dtype(dtype))
