"""`rms_norm`: its signature, and the function in PyTorch with its gradients."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class RmsNorm(Protocol):
    """See `kernels.rms_norm.naive.rms_norm`."""

    def __call__(self, x: Tensor, gain: Tensor, epsilon: float, /) -> Tensor: ...


def empty_result(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """The result, not filled yet: without gaps, whatever the strides of `x`."""
    return x.new_empty(x.shape)


def torch_rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """The function of `kernels.rms_norm.naive.rms_norm`.

    Backward keeps `x` and a number per row. Left to PyTorch's autograd, the formula keeps `x` and the normalised values in
    fp32, which without recomputation is a third of what a block keeps in bf16.
    """
    if x.is_cuda:
        # One kernel each way, which keeps as little.
        return F.rms_norm(x, gain.shape, gain, epsilon)
    out: Tensor = _RMSNormalise.apply(x, gain, epsilon)
    return out


class _RMSNormalise(torch.autograd.Function):
    """With n = x r, r = (mean(x^2) + epsilon)^-1/2: dx = r (g dy - n mean(g dy n)) and dg = sum over rows of dy n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, gain, scale)
        return (wide * scale).mul_(gain.to(wide.dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, gain, scale = ctx.saved_tensors
        normal, grad = x.to(scale.dtype) * scale, grads[0].to(scale.dtype)
        wide_gain, of_gain = gain.to(scale.dtype), grad * normal
        grad_x = grad_gain = None
        if ctx.needs_input_grad[0]:
            along = (of_gain @ wide_gain).div_(len(gain)).unsqueeze(-1)
            grad_x = (grad * wide_gain).sub_(normal.mul_(along)).mul_(scale).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_gain = of_gain.flatten(0, -2).sum(0).to(gain.dtype)
        return grad_x, grad_gain, None
