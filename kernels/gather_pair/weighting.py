"""Activation and scores between the two gathers of a pair, and a pair that is made of two gathers.

Legend: T tokens, J rows read per token, C column groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.signatures import GatherDot, GatherSum
from kernels.gather_pair.operands import Activation, Pair, PairGradients, PairOperands


def weighted(scores: Tensor, products: Tensor, activation: Activation) -> Tensor:
    """The coefficients of the values, scores [T, J, C] times act(products [T, J]): [T, J, C]."""
    if activation == "gelu":
        products = F.gelu(products)
    return scores * products.unsqueeze(2)


def weighting_gradients(
    scores: Tensor, products: Tensor, grad_coef: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """The gradients of `weighted` in its scores and products, each rounded once, from `grad_coef` [T, J, C]."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    hidden, grad_coef = products.to(wide), grad_coef.to(wide)
    grad_products = (grad_coef * scores.to(wide)).sum(2)
    if activation == "gelu":
        grad_products = torch.ops.aten.gelu_backward(grad_products, hidden)
        hidden = F.gelu(hidden)
    return (grad_coef * hidden.unsqueeze(2)).to(scores.dtype), grad_products.to(products.dtype)


def pair_of_gathers(gather_dot: GatherDot, gather_sum: GatherSum) -> Pair:
    """A pair made of the two gathers of an implementation, one after the other."""

    def forward(o: PairOperands) -> tuple[Tensor, Tensor]:
        products = gather_dot(o.pre_values, o.ids, o.x).squeeze(2)
        coef = weighted(o.scores, products, o.activation)
        return gather_sum(o.values, o.ids, coef, o.bins, o.num_bins), products

    def gradients(o: PairOperands, products: Tensor, grad_out: Tensor) -> PairGradients:
        grad_coef = gather_dot(o.values, o.ids, grad_out, o.scores.shape[2], o.bins)
        grad_scores, grad_products = weighting_gradients(o.scores, products, grad_coef, o.activation)
        grad_x = gather_sum(o.pre_values, o.ids, grad_products.unsqueeze(2))
        return PairGradients(grad_scores, grad_products, weighted(o.scores, products, o.activation), grad_x)

    return Pair(forward, gradients)
