"""A pair made of the two gathers of an implementation, one after the other; not differentiable.

Legend: R table rows, T tokens, J rows read per token, C scores per row, P pre-value columns, V value columns, B blocks of entries.
"""

from __future__ import annotations

from torch import Tensor

from kernels.gather_pair.weighting import Activation, weighted, weighting_gradients
from kernels.pieces import DotRows, PairGradients, PairOfRows, SumRows


def pair_of_gathers(sum_rows: SumRows, dot_rows: DotRows) -> tuple[PairOfRows, PairGradients]:
    """`kernels.pieces.PairOfRows` and `PairGradients`, made of the gathers."""

    def pair(
        pre_values: Tensor,
        values: Tensor,
        ids: Tensor,
        x: Tensor,
        scores: Tensor,
        activation: Activation,
        block: Tensor | None = None,
        num_blocks: int = 1,
    ) -> tuple[Tensor, Tensor]:
        products = dot_rows(pre_values, ids, x, 1).squeeze(2)
        return sum_rows(values, ids, weighted(scores, products, activation), block, num_blocks), products

    def gradients(
        pre_values: Tensor,
        values: Tensor,
        ids: Tensor,
        scores: Tensor,
        products: Tensor,
        grad_out: Tensor,
        activation: Activation,
        block: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad_coef = dot_rows(values, ids, grad_out, scores.shape[2], block)
        grad_scores, grad_products = weighting_gradients(scores, products, grad_coef, activation)
        grad_x = sum_rows(pre_values, ids, grad_products.unsqueeze(2))
        return grad_scores, grad_products, weighted(scores, products, activation), grad_x

    return pair, gradients
