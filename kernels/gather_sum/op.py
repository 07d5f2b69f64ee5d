"""`gather_sum` as an autograd op whose table gradient goes straight into Megatron's fp32 `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.pieces import Gather, Pieces
from kernels.segment_accumulate.op import apply_gather, table_gradient


def differentiable_gather_sum(pieces: Pieces) -> Gather:
    """The function of `kernels.gather_sum.naive.gather_sum`, made of one implementation, without a [T, J, W] temporary.

    The gradient of a table that carries a `main_grad` is added there, and autograd sees an empty sparse gradient in its place.
    """

    def gather_sum(
        table: Tensor, ids: Tensor, coef: Tensor, /, block: Tensor | None = None, num_blocks: int = 1
    ) -> Tensor:
        return apply_gather(_GatherSum, table, ids, coef, block, num_blocks, pieces)

    return gather_sum


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None, num_blocks: int, pieces: Pieces
    ) -> Tensor:
        ctx.save_for_backward(table, ids, coef, block)
        ctx.pieces = pieces
        return pieces.sum_rows(table, ids, coef, block, num_blocks)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        table, ids, coef, block = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_coef = ctx.pieces.dot_rows(table, ids, grad_out, coef.shape[2], block) if ctx.needs_input_grad[2] else None
        grad_table = (
            table_gradient(table, ids, coef, grad_out, block, accumulate=ctx.pieces.accumulate)
            if ctx.needs_input_grad[0]
            else None
        )
        return grad_table, None, grad_coef, None, None, None
