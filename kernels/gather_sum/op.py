"""`gather_sum`: the autograd op, whose table gradients go straight into Megatron's `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common.autograd import apply_gather, table_gradient
from kernels.common.signatures import GatherDot, GatherSum
from kernels.segment_accumulate.op import SegmentAccumulate


def empty_result(table: Tensor, ids: Tensor, coef: Tensor, bins: Tensor | None = None, num_bins: int = 1) -> Tensor:
    """The result, not filled yet; also the ops' fake for `torch.compile`."""
    return table.new_empty(ids.shape[0], num_bins * table.shape[1])


def differentiable(gather_sum: GatherSum, gather_dot: GatherDot, segment_accumulate: SegmentAccumulate) -> GatherSum:
    """The same function with gradients: the coefficients' by `gather_dot`, the table's by `segment_accumulate`."""

    def with_gradients(
        table: Tensor, ids: Tensor, coef: Tensor, /, bins: Tensor | None = None, num_bins: int = 1
    ) -> Tensor:
        ops = (gather_sum, gather_dot, segment_accumulate)
        return apply_gather(_GatherSum, table, ids, coef, bins, num_bins, *ops)

    return with_gradients


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        ids: Tensor,
        coef: Tensor,
        bins: Tensor | None,
        num_bins: int,
        gather_sum: GatherSum,
        gather_dot: GatherDot,
        segment_accumulate: SegmentAccumulate,
    ) -> Tensor:
        ctx.save_for_backward(table, ids, coef, bins)
        ctx.gather_dot, ctx.accumulate = gather_dot, segment_accumulate
        return gather_sum(table, ids, coef, bins, num_bins)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        table, ids, coef, bins = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_table = grad_coef = None
        if ctx.needs_input_grad[2]:
            grad_coef = ctx.gather_dot(table, ids, grad_out, coef.shape[2], bins)
        if ctx.needs_input_grad[0]:
            grad_table = table_gradient(table, ids, coef, grad_out, bins, accumulate=ctx.accumulate)
        return grad_table, None, grad_coef, *(None,) * 5
