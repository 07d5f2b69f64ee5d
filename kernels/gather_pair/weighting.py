"""What stands between the two gathers of a pair: the activation of the products, and the scores.

Legend: T tokens, J rows read per token, C scores per row.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Activation: TypeAlias = Literal["none", "gelu"]
"""Of the products: none (UltraMemV2, Eq. 15) or the exact gelu (Eq. 13, PEER)."""


def weighted(scores: Tensor, products: Tensor, activation: Activation) -> Tensor:
    """The coefficients of the values, scores [T, J, C] times act(products [T, J]): [T, J, C]."""
    if activation == "gelu":
        products = F.gelu(products)
    return scores * products.unsqueeze(2)


def weighting_gradients(
    scores: Tensor, products: Tensor, grad_coef: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """The gradients of `weighted` in scores, [T, J, C], and products, [T, J], from that of the coefficients, [T, J, C]; each rounded once."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    hidden, grad_coef = products.to(wide), grad_coef.to(wide)
    grad_products = (grad_coef * scores.to(wide)).sum(2)
    if activation == "gelu":
        grad_products = torch.ops.aten.gelu_backward(grad_products, hidden)
        hidden = F.gelu(hidden)
    return (grad_coef * hidden.unsqueeze(2)).to(scores.dtype), grad_products.to(products.dtype)
