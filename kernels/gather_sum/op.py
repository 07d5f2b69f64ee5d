"""`gather_sum`: its signature, and the autograd op whose table gradient goes straight into Megatron's fp32 `main_grad`."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.common.autograd import apply_gather, table_gradient
from kernels.gather_dot.op import GatherDot
from kernels.segment_accumulate.op import SegmentAccumulate


class GatherSum(Protocol):
    """See `kernels.gather_sum.naive.gather_sum`; sums in fp32 (fp64 for fp64 tables), of contiguous tables, without a [T, J, W] temporary."""

    def __call__(
        self, table: Tensor, ids: Tensor, coef: Tensor, /, block: Tensor | None = None, num_blocks: int = 1
    ) -> Tensor: ...


def empty_result(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None, num_blocks: int) -> Tensor:
    """Room for the result, and all of it that `torch.compile` wants to know."""
    return table.new_empty(ids.shape[0], num_blocks * table.shape[1])


def differentiable(gather_sum: GatherSum, gather_dot: GatherDot, segment_accumulate: SegmentAccumulate) -> GatherSum:
    """The same function with gradients: that of the coefficients is `gather_dot`, that of the table `segment_accumulate`.

    The gradient of a table that carries a `main_grad` is added there, and autograd sees an empty sparse gradient in its place.
    """
    parts = (gather_sum, gather_dot, segment_accumulate)

    def with_gradients(
        table: Tensor, ids: Tensor, coef: Tensor, /, block: Tensor | None = None, num_blocks: int = 1
    ) -> Tensor:
        return apply_gather(_GatherSum, table, ids, coef, block, num_blocks, *parts)

    return with_gradients


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        ids: Tensor,
        coef: Tensor,
        block: Tensor | None,
        num_blocks: int,
        gather_sum: GatherSum,
        gather_dot: GatherDot,
        segment_accumulate: SegmentAccumulate,
    ) -> Tensor:
        ctx.save_for_backward(table, ids, coef, block)
        ctx.gather_dot, ctx.accumulate = gather_dot, segment_accumulate
        return gather_sum(table, ids, coef, block, num_blocks)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        table, ids, coef, block = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_table = grad_coef = None
        if ctx.needs_input_grad[2]:
            grad_coef = ctx.gather_dot(table, ids, grad_out, coef.shape[2], block)
        if ctx.needs_input_grad[0]:
            grad_table = table_gradient(table, ids, coef, grad_out, block, accumulate=ctx.accumulate)
        return grad_table, None, grad_coef, None, None, None, None, None
