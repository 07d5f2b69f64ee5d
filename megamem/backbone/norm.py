"""Norms that work under sequence parallelism."""

from __future__ import annotations

import pkgutil

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from kernels.rms_norm.op import RmsNorm, torch_rms_norm
from megamem.parameters.declaration import ReducedOver, declare, parameter_device


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, for any norm slot of Megatron's specs.

    Under sequence parallelism every tensor-parallel rank normalises other tokens (or other heads) with the same gain,
    so Megatron has to all-reduce the gain's gradient. PyTorch's own RMSNorm does not ask for it, so Megatron refuses it
    there.

    Attributes:
        normalise: computes it; the model sets its own, because Megatron builds norms of a class alone.
    """

    normalise: RmsNorm

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.normalise = eps, torch_rms_norm
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=parameter_device(config)))
        declare(self.weight, "backbone_no_decay", reduced_over=ReducedOver.TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """Gain of the norm of query or key heads, which attention applies where it turns them: here heads pass as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class ApexRMSNorm(RMSNorm):
    """RMSNorm by Apex's kernels, which keep the input and a number per row, too."""

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
