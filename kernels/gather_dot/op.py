"""`gather_dot`: its signature, and the autograd op whose table gradient goes straight into Megatron's fp32 `main_grad`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kernels.common.autograd import apply_gather, table_gradient
from kernels.segment_accumulate.op import SegmentAccumulate

if TYPE_CHECKING:
    from kernels.gather_sum.op import GatherSum


class GatherDot(Protocol):
    """See `kernels.gather_dot.naive.gather_dot`; sums in fp32 (fp64 for fp64 tables), of contiguous tables, without a [T, J, W] temporary."""

    def __call__(
        self, table: Tensor, ids: Tensor, x: Tensor, /, num_groups: int = 1, block: Tensor | None = None
    ) -> Tensor: ...


def empty_result(table: Tensor, ids: Tensor, x: Tensor, num_groups: int, block: Tensor | None) -> Tensor:
    """Room for the result, and all of it that `torch.compile` wants to know."""
    return x.new_empty(*ids.shape, num_groups)


def differentiable(gather_dot: GatherDot, gather_sum: GatherSum, segment_accumulate: SegmentAccumulate) -> GatherDot:
    """The same function with gradients: that of the vectors is `gather_sum`, that of the table `segment_accumulate`.

    The gradient of a table that carries a `main_grad` is added there, and autograd sees an empty sparse gradient in its place.
    """
    parts = (gather_dot, gather_sum, segment_accumulate)

    def with_gradients(
        table: Tensor, ids: Tensor, x: Tensor, /, num_groups: int = 1, block: Tensor | None = None
    ) -> Tensor:
        return apply_gather(_GatherDot, table, ids, x, num_groups, block, *parts)

    return with_gradients


class _GatherDot(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        ids: Tensor,
        x: Tensor,
        num_groups: int,
        block: Tensor | None,
        gather_dot: GatherDot,
        gather_sum: GatherSum,
        segment_accumulate: SegmentAccumulate,
    ) -> Tensor:
        ctx.save_for_backward(table, ids, x, block)
        ctx.gather_sum, ctx.accumulate = gather_sum, segment_accumulate
        return gather_dot(table, ids, x, num_groups, block)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        table, ids, x, block = ctx.saved_tensors
        coef = grads[0].contiguous()
        grad_table = grad_x = None
        if ctx.needs_input_grad[2]:
            num_blocks = 1 if block is None else x.shape[1] // table.shape[1]
            grad_x = ctx.gather_sum(table, ids, coef, block, num_blocks)
        if ctx.needs_input_grad[0]:
            grad_table = table_gradient(table, ids, coef, x, block, accumulate=ctx.accumulate)
        return grad_table, None, grad_x, None, None, None, None, None
