"""`gather_pair`: its signature, and the autograd op, whose table gradients go straight into Megatron's `main_grad`."""

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
    """`kernels.gather_pair.naive.gather_pair` of one implementation. For backward it keeps the products."""

    def with_gradients(*operands: Any) -> Tensor:
        return apply_gather(_GatherPair, *PairOperands(*operands), *gather_pair, segment_accumulate)

    return with_gradients


class _GatherPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *operands, forward, ctx.gradients, ctx.accumulate = arguments
        o = PairOperands(*operands)
        out, products = forward(o)
        ctx.save_for_backward(o.pre_values, o.values, o.ids, o.x, o.scores, o.bins, products)
        ctx.activation, ctx.num_bins = o.activation, o.num_bins
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        *tensors, bins, products = ctx.saved_tensors
        o = PairOperands._make([*tensors, ctx.activation, bins, ctx.num_bins])
        grad_out = grads[0].contiguous()
        of = ctx.gradients(o, products, grad_out)
        wants_pre_values, wants_values, _, wants_x, wants_scores = ctx.needs_input_grad[:5]
        of_pre_values = of_values = None
        if wants_pre_values:
            of_pre_values = table_gradient(
                o.pre_values, o.ids, of.products.unsqueeze(2), o.x, accumulate=ctx.accumulate
            )
        if wants_values:
            of_values = table_gradient(o.values, o.ids, of.coef, grad_out, o.bins, accumulate=ctx.accumulate)
        of_x, of_scores = of.x if wants_x else None, of.scores if wants_scores else None
        return of_pre_values, of_values, None, of_x, of_scores, *(None,) * 6
