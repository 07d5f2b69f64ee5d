"""`doubly_stochastic` in Triton: a program has whole matrices in registers, and a launch each way takes all steps.

Legend: T iterations, M matrices, n rows and columns of each.
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
from kernels.common.tiles import matrices_tile
from kernels.doubly_stochastic.op import empty_result, num_steps


@triton.jit
def _places(num_matrices, n: tl.constexpr, MATRICES: tl.constexpr, SIDE: tl.constexpr):
    """Places of a program's numbers [MATRICES, SIDE, SIDE], and where there are any."""
    matrix = (tl.program_id(0).to(tl.int64) * MATRICES + tl.arange(0, MATRICES))[:, None, None]
    row, column = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    return matrix * (n * n) + row * n + column, (matrix < num_matrices) & (row < n) & (column < n)


@triton.jit
def _shares(logits, at, there, n: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr):
    """Softmax over columns, and 0 where there is none."""
    logit = tl.load(logits + at, mask=there, other=0).to(WIDE)
    # Rows that are not there have a softmax, too, so that nothing is divided by 0.
    logit = tl.where((tl.arange(0, SIDE) < n)[None, None, :], logit, float("-inf"))
    shares = tl.exp(logit - tl.max(logit, 2)[:, :, None])
    return tl.where(there, shares / tl.sum(shares, 2)[:, :, None], 0)


@triton.jit(do_not_specialize=["num_matrices", "iterations"])
def doubly_stochastic_kernel(
    logits,
    out,
    num_matrices,
    iterations,
    epsilon,
    n: tl.constexpr,
    MATRICES: tl.constexpr,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The grid is (tiles of MATRICES matrices,). Numbers that are not there stay 0, which no sum sees."""
    at, there = _places(num_matrices, n, MATRICES, SIDE)
    mix = _shares(logits, at, there, n, SIDE, WIDE)
    mix = tl.where(there, mix + epsilon, 0)
    mix *= (1 / (tl.sum(mix, 1) + epsilon))[:, None, :]
    for _ in range(1, iterations):
        mix *= (1 / (tl.sum(mix, 2) + epsilon))[:, :, None]
        mix *= (1 / (tl.sum(mix, 1) + epsilon))[:, None, :]
    tl.store(out + at, mix.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_matrices", "iterations"])
def doubly_stochastic_gradient_kernel(
    logits,
    gradient,
    out,
    scratch,
    num_matrices,
    iterations,
    epsilon,
    n: tl.constexpr,
    MATRICES: tl.constexpr,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The gradient of the logits. The grid is that of the other way.

    Args:
        scratch: [2 T - 1, M, n], every step's sums, which this kernel writes and reads.
    """
    at, there = _places(num_matrices, n, MATRICES, SIDE)
    matrix = (tl.program_id(0).to(tl.int64) * MATRICES + tl.arange(0, MATRICES))[:, None]
    place = tl.arange(0, SIDE)[None, :]
    present = (matrix < num_matrices) & (place < n)
    sums_at, of_step = scratch + matrix * n + place, num_matrices.to(tl.int64) * n
    shares = _shares(logits, at, there, n, SIDE, WIDE)
    mix = tl.where(there, shares + epsilon, 0)
    sums = tl.sum(mix, 1) + epsilon
    tl.store(sums_at, sums, mask=present)
    mix *= (1 / sums)[:, None, :]
    for _ in range(1, iterations):
        sums = tl.sum(mix, 2) + epsilon
        sums_at += of_step
        tl.store(sums_at, sums, mask=present)
        mix *= (1 / sums)[:, :, None]
        sums = tl.sum(mix, 1) + epsilon
        sums_at += of_step
        tl.store(sums_at, sums, mask=present)
        mix *= (1 / sums)[:, None, :]
    # Threads read what others of the program have written.
    tl.debug_barrier()
    of_mix = tl.load(gradient + at, mask=there, other=0).to(WIDE)
    for _ in range(1, iterations):
        divisor = tl.load(sums_at, mask=present, other=1)
        of_mix = tl.where(there, (of_mix - tl.sum(of_mix * mix, 1)[:, None, :]) * (1 / divisor)[:, None, :], 0)
        mix *= divisor[:, None, :]
        sums_at -= of_step
        divisor = tl.load(sums_at, mask=present, other=1)
        of_mix = tl.where(there, (of_mix - tl.sum(of_mix * mix, 2)[:, :, None]) * (1 / divisor)[:, :, None], 0)
        mix *= divisor[:, :, None]
        sums_at -= of_step
    divisor = tl.load(sums_at, mask=present, other=1)
    of_mix = tl.where(there, (of_mix - tl.sum(of_mix * mix, 1)[:, None, :]) * (1 / divisor)[:, None, :], 0)
    of_mix = shares * (of_mix - tl.sum(of_mix * shares, 2)[:, :, None])
    tl.store(out + at, of_mix.to(out.dtype.element_ty), mask=there)


@cache
def _plan(num_matrices: int, n: int, dtype: torch.dtype) -> tuple[int, tuple[Any, ...], int]:
    """Tiles of matrices, the constants of both kernels, and their warps."""
    tile = matrices_tile(n)
    return -(-num_matrices // tile.matrices), (n, tile.matrices, tile.side, sum_dtype(dtype)), tile.num_warps


@custom_op("triton_doubly_stochastic", empty_result)
def _doubly_stochastic(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    logits, out, n = logits.contiguous(), empty_result(logits, iterations, epsilon), logits.shape[-1]
    if num_matrices := logits.numel() // n**2:
        num_tiles, constants, num_warps = _plan(num_matrices, n, logits.dtype)
        with on_device_of(logits):
            doubly_stochastic_kernel[(num_tiles,)](
                *(logits, out, num_matrices, iterations, epsilon), *constants, num_warps=num_warps
            )
    return out


def _empty_gradient(logits: Tensor, gradient: Tensor, iterations: int, epsilon: float) -> Tensor:
    return empty_result(logits, iterations, epsilon)


@custom_op("triton_doubly_stochastic_gradient", _empty_gradient)
def _gradient(logits: Tensor, gradient: Tensor, iterations: int, epsilon: float) -> Tensor:
    """The gradient of the logits from that of the result."""
    logits, out, n = logits.contiguous(), empty_result(logits, iterations, epsilon), logits.shape[-1]
    if num_matrices := logits.numel() // n**2:
        num_tiles, constants, num_warps = _plan(num_matrices, n, logits.dtype)
        wide = torch.promote_types(logits.dtype, torch.float32)
        scratch = torch.empty(num_steps(iterations), num_matrices, n, dtype=wide, device=logits.device)
        with on_device_of(logits):
            doubly_stochastic_gradient_kernel[(num_tiles,)](
                *(logits, gradient.contiguous(), out, scratch, num_matrices, iterations, epsilon),
                *constants,
                num_warps=num_warps,
            )
    return out


class _DoublyStochastic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, epsilon: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.numbers = iterations, epsilon
        return _doubly_stochastic(logits, iterations, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        return _gradient(logits, grads[0], *ctx.numbers), None, None


def doubly_stochastic(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    """The function of `kernels.doubly_stochastic.naive.doubly_stochastic`."""
    if not needs_gradient(logits):
        return _doubly_stochastic(logits, iterations, epsilon)
    out: Tensor = _DoublyStochastic.apply(logits, iterations, epsilon)
    return out
