"""Norms that work under sequence parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megamem.parameters import ReducedOver, declare, parameter_device


def rms_normalise(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """x gain / sqrt(mean(x^2) + epsilon) over the last dimension, in at least fp32, returned in the dtype of `x`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gain.to(wide.dtype)).to(x.dtype)


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
