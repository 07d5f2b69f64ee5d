"""`gather_dot`: the autograd op, whose table gradients go straight into Megatron's `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common.autograd import apply_gather, table_gradient
from kernels.common.signatures import GatherDot, GatherSum
from kernels.segment_accumulate.op import SegmentAccumulate


def empty_result(table: Tensor, ids: Tensor, x: Tensor, num_groups: int = 1, bins: Tensor | None = None) -> Tensor:
    """The result, not filled yet; also the ops' fake for `torch.compile`."""
    return x.new_empty(*ids.shape, num_groups)


def differentiable(gather_dot: GatherDot, gather_sum: GatherSum, segment_accumulate: SegmentAccumulate) -> GatherDot:
    """The same function with gradients: x's by `gather_sum`, the table's by `segment_accumulate`."""

    def with_gradients(
        table: Tensor, ids: Tensor, x: Tensor, /, num_groups: int = 1, bins: Tensor | None = None
    ) -> Tensor:
        ops = (gather_dot, gather_sum, segment_accumulate)
        return apply_gather(_GatherDot, table, ids, x, num_groups, bins, *ops)

    return with_gradients


class _GatherDot(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        ids: Tensor,
        x: Tensor,
        num_groups: int,
        bins: Tensor | None,
        gather_dot: GatherDot,
        gather_sum: GatherSum,
        segment_accumulate: SegmentAccumulate,
    ) -> Tensor:
        ctx.save_for_backward(table, ids, x, bins)
        ctx.gather_sum, ctx.accumulate = gather_sum, segment_accumulate
        return gather_dot(table, ids, x, num_groups, bins)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        table, ids, x, bins = ctx.saved_tensors
        coef = grads[0].contiguous()
        grad_table = grad_x = None
        if ctx.needs_input_grad[2]:
            num_bins = 1 if bins is None else x.shape[1] // table.shape[1]
            grad_x = ctx.gather_sum(table, ids, coef, bins, num_bins)
        if ctx.needs_input_grad[0]:
            grad_table = table_gradient(table, ids, coef, x, bins, accumulate=ctx.accumulate)
        return grad_table, None, grad_x, *(None,) * 5
