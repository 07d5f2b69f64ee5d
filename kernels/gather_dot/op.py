"""`gather_dot` as an autograd op whose table gradient goes straight into Megatron's fp32 `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.gather_dot.forward import grouped_gather_dot
from kernels.gather_sum.forward import grouped_gather_sum
from kernels.segment_accumulate.op import table_gradient


def gather_dot(table: Tensor, ids: Tensor, x: Tensor, block: Tensor | None = None, num_blocks: int = 1) -> Tensor:
    """The function of `kernels.gather_dot.naive.gather_dot`, without its [T, J, W] temporary.

    The gradient of a table that carries a `main_grad` is added there, and autograd sees an empty sparse gradient in its place.
    """
    out: Tensor = _GatherDot.apply(table, ids, x, block, num_blocks)
    return out


class _GatherDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, x: Tensor, block: Tensor | None, num_blocks: int) -> Tensor:
        ctx.save_for_backward(table, ids, x, block)
        ctx.num_blocks = num_blocks
        return grouped_gather_dot(table, ids, x, 1, block).squeeze(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        table, ids, x, block = ctx.saved_tensors
        coef = grads[0].unsqueeze(2).contiguous()
        grad_x = grouped_gather_sum(table, ids, coef, block, ctx.num_blocks) if ctx.needs_input_grad[2] else None
        grad_table = table_gradient(table, ids, coef, x, block) if ctx.needs_input_grad[0] else None
        return grad_table, None, grad_x, None, None
