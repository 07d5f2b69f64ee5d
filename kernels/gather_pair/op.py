"""`gather_pair`: its signature, and the autograd op whose table gradients go straight into Megatron's fp32 `main_grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kernels.common.autograd import apply_gather, table_gradient
from kernels.gather_pair.operands import Pair, PairOperands
from kernels.segment_accumulate.op import SegmentAccumulate

GatherPair: TypeAlias = Callable[..., Tensor]
"""Takes the fields of `PairOperands` in their order; see `kernels.gather_pair.naive.gather_pair`."""


def differentiable(gather_pair: Pair, segment_accumulate: SegmentAccumulate) -> GatherPair:
    """The function of `kernels.gather_pair.naive.gather_pair`, made of one implementation, without temporaries of the size of the rows.

    Of what lies between the gathers only the products are kept for backward. The gradient of a table that carries a `main_grad` is added
    there, and autograd sees an empty sparse gradient in its place.
    """

    def with_gradients(*operands: Any) -> Tensor:
        return apply_gather(_GatherPair, *PairOperands(*operands), *gather_pair, segment_accumulate)

    return with_gradients


class _GatherPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *fields, forward, ctx.gradients, ctx.accumulate = arguments
        operands = PairOperands(*fields)
        out, products = forward(operands)
        ctx.save_for_backward(*(field for field in operands if isinstance(field, Tensor)), products)
        ctx.activation, ctx.has_block, ctx.num_blocks = (
            operands.activation,
            operands.block is not None,
            operands.num_blocks,
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        *tensors, products = ctx.saved_tensors
        block = tensors.pop() if ctx.has_block else None
        o = PairOperands._make([*tensors, ctx.activation, block, ctx.num_blocks])
        grad_out = grads[0].contiguous()
        of = ctx.gradients(o, products, grad_out)
        wants_pre_values, wants_values, _, wants_x, wants_scores = ctx.needs_input_grad[:5]
        of_pre_values = of_values = None
        if wants_pre_values:
            of_pre_values = table_gradient(
                o.pre_values, o.ids, of.products.unsqueeze(2), o.x, accumulate=ctx.accumulate
            )
        if wants_values:
            of_values = table_gradient(o.values, o.ids, of.coef, grad_out, o.block, accumulate=ctx.accumulate)
        of_x, of_scores = of.x if wants_x else None, of.scores if wants_scores else None
        return of_pre_values, of_values, None, of_x, of_scores, None, None, None, None, None, None
