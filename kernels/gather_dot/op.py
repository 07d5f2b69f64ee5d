"""`gather_dot` as an autograd op whose table gradient goes straight into Megatron's fp32 `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.pieces import Gather, Pieces
from kernels.segment_accumulate.op import apply_gather, table_gradient


def differentiable_gather_dot(pieces: Pieces) -> Gather:
    """The function of `kernels.gather_dot.naive.gather_dot`, made of one implementation, without a [T, J, W] temporary.

    The gradient of a table that carries a `main_grad` is added there, and autograd sees an empty sparse gradient in its place.
    """

    def gather_dot(
        table: Tensor, ids: Tensor, x: Tensor, /, block: Tensor | None = None, num_blocks: int = 1
    ) -> Tensor:
        return apply_gather(_GatherDot, table, ids, x, block, num_blocks, pieces)

    return gather_dot


class _GatherDot(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Tensor, ids: Tensor, x: Tensor, block: Tensor | None, num_blocks: int, pieces: Pieces
    ) -> Tensor:
        ctx.save_for_backward(table, ids, x, block)
        ctx.num_blocks, ctx.pieces = num_blocks, pieces
        return pieces.dot_rows(table, ids, x, 1, block).squeeze(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        table, ids, x, block = ctx.saved_tensors
        coef = grads[0].unsqueeze(2).contiguous()
        grad_x = ctx.pieces.sum_rows(table, ids, coef, block, ctx.num_blocks) if ctx.needs_input_grad[2] else None
        grad_table = (
            table_gradient(table, ids, coef, x, block, accumulate=ctx.pieces.accumulate)
            if ctx.needs_input_grad[0]
            else None
        )
        return grad_table, None, grad_x, None, None, None
