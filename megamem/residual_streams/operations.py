"""Operations on streams that are not among the kernels, computed in at least fp32, with their gradients.

Backward keeps streams in their own dtype. Left to autograd, every operation would keep a copy of them in fp32, which in
bf16 is twice the streams themselves.

Legend: t tokens of a sequence on this rank, b sequences, n streams, D hidden size, K columns, M outputs. i is a stream.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which maps are computed: fp32, or that of the streams if it has more digits."""
    return torch.promote_types(dtype, torch.float32)


def stream_norm(streams: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm of every stream, rounded to the streams' dtype once.

    Args:
        streams: [t, b, n, D].
        gain: [n, D], in at least fp32.
    """
    out: Tensor = _StreamNorm.apply(streams, gain, epsilon)
    return out


class _StreamNorm(torch.autograd.Function):
    """With N = X r, r = (mean(X^2) + epsilon)^-1/2: dX = r (g dz - N mean(g dz N)) and dg = sum over tokens of dz N."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        wide = streams.to(gain.dtype)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(streams, gain, scale)
        return (wide * scale).mul_(gain).to(streams.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        streams, gain, scale = ctx.saved_tensors
        normal, grad = streams.to(gain.dtype) * scale, grads[0].to(gain.dtype)
        of_gain, of_streams = grad * normal, None
        if ctx.needs_input_grad[0]:
            along = (of_gain * gain).mean(-1, keepdim=True)
            of_streams = torch.addcmul(grad * gain, normal, along, value=-1).mul_(scale).to(streams.dtype)
        return of_streams, of_gain.sum((0, 1)) if ctx.needs_input_grad[1] else None, None


def gated_mean(normal: Tensor, logits: Tensor) -> Tensor:
    """u = mean_i sigmoid(l_i) z_i, [t, b, D], rounded to the dtype of z once.

    Args:
        normal: z [t, b, n, D].
        logits: l [t, b, n, D].
    """
    out: Tensor = _GatedMean.apply(normal, logits)
    return out


class _GatedMean(torch.autograd.Function):
    """With g = sigmoid(l): dz_i = g_i du / n and dl_i = z_i g_i (1 - g_i) du / n."""

    @staticmethod
    def forward(ctx: Any, normal: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(normal, logits)
        gate = torch.sigmoid(logits.to(wide_dtype(logits.dtype)))
        return gate.mul_(normal).mean(-2).to(normal.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        normal, logits = ctx.saved_tensors
        gate = torch.sigmoid(logits.to(wide_dtype(logits.dtype)))
        gated = gate * (grads[0].to(gate.dtype) / normal.shape[-2]).unsqueeze(-2)
        return gated.to(normal.dtype), (1 - gate).mul_(normal).mul_(gated).to(logits.dtype)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """W x, [..., M], in the dtype of W.

    Args:
        x: [..., K], of any dtype.
        weight: W [M, K], in at least fp32.
    """
    out: Tensor = _WideProduct.apply(x, weight)
    return out


class _WideProduct(torch.autograd.Function):
    """Product with x in the dtype of W; backward keeps x in its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(weight.dtype), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        of_x = (grad @ weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = grad.flatten(0, -2).t() @ x.to(weight.dtype).flatten(0, -2)
        return of_x, of_weight
