"""`gather_pair` as an autograd op whose table gradients go straight into Megatron's fp32 `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.gather_pair.weighting import Activation, weighted
from kernels.pieces import Gather, GatherPair, Pieces
from kernels.segment_accumulate.op import apply_gather, table_gradient


def differentiable_gather_pair(pieces: Pieces) -> GatherPair:
    """The function of `kernels.gather_pair.naive.gather_pair`, made of one implementation, without temporaries of the size of the rows.

    Of what lies between the gathers only the products are kept for backward. The gradient of a table that carries a `main_grad` is added
    there, and autograd sees an empty sparse gradient in its place.
    """

    def gather_pair(
        pre_values: Tensor,
        values: Tensor,
        ids: Tensor,
        x: Tensor,
        scores: Tensor,
        /,
        activation: Activation = "none",
        block: Tensor | None = None,
        num_blocks: int = 1,
    ) -> Tensor:
        return apply_gather(_GatherPair, pre_values, values, ids, x, scores, activation, block, num_blocks, pieces)

    return gather_pair


def separate_gathers(gather_dot: Gather, gather_sum: Gather) -> GatherPair:
    """The same function by two differentiable gathers, each with the backward pass that it has alone."""

    def gather_pair(
        pre_values: Tensor,
        values: Tensor,
        ids: Tensor,
        x: Tensor,
        scores: Tensor,
        /,
        activation: Activation = "none",
        block: Tensor | None = None,
        num_blocks: int = 1,
    ) -> Tensor:
        coef = weighted(scores, gather_dot(pre_values, ids, x), activation)
        return gather_sum(values, ids, coef, block, num_blocks)

    return gather_pair


class _GatherPair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pre_values: Tensor,
        values: Tensor,
        ids: Tensor,
        x: Tensor,
        scores: Tensor,
        activation: Activation,
        block: Tensor | None,
        num_blocks: int,
        pieces: Pieces,
    ) -> Tensor:
        out, products = pieces.pair(pre_values, values, ids, x, scores, activation, block, num_blocks)
        ctx.save_for_backward(pre_values, values, ids, x, scores, products, block)
        ctx.activation, ctx.pieces = activation, pieces
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        pre_values, values, ids, x, scores, products, block = ctx.saved_tensors
        grad_out, accumulate = grads[0].contiguous(), ctx.pieces.accumulate
        grad_scores, grad_products, coef, grad_x = ctx.pieces.pair_gradients(
            pre_values, values, ids, scores, products, grad_out, ctx.activation, block
        )
        wants_pre_values, wants_values, _, wants_x, wants_scores = ctx.needs_input_grad[:5]
        grad_pre_values = grad_values = None
        if wants_pre_values:
            grad_pre_values = table_gradient(pre_values, ids, grad_products.unsqueeze(2), x, accumulate=accumulate)
        if wants_values:
            grad_values = table_gradient(values, ids, coef, grad_out, block, accumulate=accumulate)
        grad_x, grad_scores = grad_x if wants_x else None, grad_scores if wants_scores else None
        return grad_pre_values, grad_values, None, grad_x, grad_scores, None, None, None, None
