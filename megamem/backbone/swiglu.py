"""SwiGLU, the activation of every feed-forward and expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu(gate_and_up: Tensor) -> Tensor:
    """silu(gate) up, [..., F] of [gate; up] [..., 2 F].

    Backward keeps what it is given, which is the first linear's output. Megatron's own, where nothing is fused, keeps
    silu(gate) and a copy of `up` besides; its fused one is compiled by every process that runs it.
    """
    out: Tensor = _SwiGLU.apply(gate_and_up)
    return out


class SwiGLU(MegatronModule):
    """`swiglu` as Megatron's `MLP` builds what stands in its activation's place."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

    def forward(self, gate_and_up: Tensor) -> Tensor:
        return swiglu(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        both = torch.empty_like(gate_and_up)
        of_gate, of_up = both.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=of_up)
        torch.mul(grads[0], up, out=of_gate)
        torch.ops.aten.silu_backward(of_gate, gate, grad_input=of_gate)
        return both
