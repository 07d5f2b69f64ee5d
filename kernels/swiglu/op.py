"""`swiglu`: its signature, and the function in PyTorch, with its gradient."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class SwiGLU(Protocol):
    """See `kernels.swiglu.naive.swiglu`."""

    def __call__(self, gate_and_up: Tensor, /) -> Tensor: ...


def empty_result(gate_and_up: Tensor) -> Tensor:
    """The result, not filled yet; also the op's fake for `torch.compile`."""
    return gate_and_up.new_empty(*gate_and_up.shape[:-1], gate_and_up.shape[-1] // 2)


def torch_swiglu(gate_and_up: Tensor) -> Tensor:
    """The function of `kernels.swiglu.naive.swiglu`.

    Backward keeps what it is given, which is the first linear's output. Megatron's own, where nothing is fused, keeps
    silu(gate) and a copy of `up` besides; its fused one is compiled by every process that runs it.
    """
    out: Tensor = _SwiGLU.apply(gate_and_up)
    return out


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
