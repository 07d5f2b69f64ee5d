"""The short causal convolution of Engram: depthwise, dilated, and across the cuts of a sequence.

Legend: t tokens of a sequence on this rank, b sequences, D channels, w tokens of the halo.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamem.chunk.halo import shifted


def causal_convolution(
    extended: tuple[Tensor, ...], weight: Tensor, positions: Tensor, *, dilation: int, width: int
) -> Tensor:
    """y_t = sum_j w_j x_{t - (taps - 1 - j) dilation}, [t, b, D], in at least fp32; zeros before position 0.

    Args:
        extended: x behind its halo (`megamem.chunk.halo.Halo.extended`), [w + length, b, D] for each stretch.
        weight: [D, taps].
        positions: [t, b], places in the sequence, or in the document.
        width: w, at least (taps - 1) dilation.
    """
    out: Tensor = _CausalConvolution.apply(weight, positions, dilation, width, *extended)
    return out


class _CausalConvolution(torch.autograd.Function):
    """Backward keeps x once; left to autograd, the sum would keep it once per tap."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, positions: Tensor, dilation: int, width: int, *extended: Tensor) -> Tensor:
        ctx.save_for_backward(weight, positions, *extended)
        ctx.dilation, ctx.width = dilation, width
        wide = torch.promote_types(weight.dtype, torch.float32)
        taps = weight.shape[1]
        out = torch.zeros(*positions.shape, weight.shape[0], dtype=wide, device=weight.device)
        for tap in range(taps):
            lag = (taps - 1 - tap) * dilation
            out += _read(extended, positions, width, lag).to(wide) * weight[:, tap].to(wide)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, positions, *extended = ctx.saved_tensors
        (grad,), width, taps = grads, ctx.width, weight.shape[1]
        of_extended = [torch.zeros(part.shape, dtype=grad.dtype, device=grad.device) for part in extended]
        of_weight = torch.empty(weight.shape, dtype=grad.dtype, device=grad.device)
        lengths = [len(part) - width for part in extended]
        for tap in range(taps):
            lag = (taps - 1 - tap) * ctx.dilation
            read = _read(tuple(extended), positions, width, lag)
            of_weight[:, tap] = (read.to(grad.dtype) * grad).flatten(0, 1).sum(0)
            passed = torch.where((positions >= lag).unsqueeze(2), grad * weight[:, tap].to(grad.dtype), 0)
            for target, part in zip(of_extended, passed.split(lengths), strict=True):
                target[width - lag : len(target) - lag] += part
        narrow = (target.to(part.dtype) for target, part in zip(of_extended, extended, strict=True))
        return of_weight.to(weight.dtype), None, None, None, *narrow


def _read(extended: tuple[Tensor, ...], positions: Tensor, width: int, lag: int) -> Tensor:
    """x `lag` tokens before each one, [t, b, D]; zeros where that is before position 0."""
    return torch.where((positions >= lag).unsqueeze(2), shifted(extended, width, lag), 0)
