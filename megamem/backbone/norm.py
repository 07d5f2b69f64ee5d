"""Norms that work under sequence parallelism."""

from __future__ import annotations

import pkgutil
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megamem.parameters import ReducedOver, declare, parameter_device


def rms_normalise(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """x gain / sqrt(mean(x^2) + epsilon) over the last dimension, in at least fp32, returned in the dtype of `x`.

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


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, for any norm slot of Megatron's specs.

    Under sequence parallelism every tensor-parallel rank normalises other tokens (or other heads) with the same gain,
    so Megatron has to all-reduce the gain's gradient. PyTorch's own RMSNorm does not ask for it, so Megatron refuses it
    there.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=parameter_device(config)))
        declare(self.weight, "backbone_no_decay", reduced_over=ReducedOver.TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalise(x, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """Gain of the norm of query or key heads, which attention applies where it turns them: here heads pass as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class ApexRMSNorm(RMSNorm):
    """The same by Apex's kernels, which keep the input and a number per row, too."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        self._norm = pkgutil.resolve_name("apex.normalization.fused_layer_norm:fused_rms_norm_affine")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._norm(x, self.weight, self.weight.shape, self.eps)
        return out


class LayerNorm(nn.Module):
    """Layer normalisation with a gain and a bias, in the place of an `RMSNorm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        device = parameter_device(config)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype, device=device))
        for parameter in (self.weight, self.bias):
            declare(parameter, "backbone_no_decay", reduced_over=ReducedOver.TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), weight.shape, weight, bias, self.eps).to(x.dtype)
