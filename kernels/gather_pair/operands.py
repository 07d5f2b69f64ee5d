"""Operands of a pair of gathers, and the parts of an implementation.

Legend: T tokens, J rows read per token, C column groups, P pre-value columns, V value columns (C divides V), B bins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

Activation: TypeAlias = Literal["none", "gelu"]
"""Activation of the products: none (UltraMemV2, Eq. 15) or the exact gelu (Eq. 13, PEER)."""


class PairOperands(NamedTuple):
    """The arguments of `kernels.gather_pair.naive.gather_pair`, which gives their shapes."""

    pre_values: Tensor
    values: Tensor
    ids: Tensor
    x: Tensor
    scores: Tensor
    activation: Activation = "none"
    bins: Tensor | None = None
    num_bins: int = 1


SCHEMA = (
    "Tensor pre_values, Tensor values, Tensor ids, Tensor x, Tensor scores, str activation, Tensor? bins, int num_bins"
)
"""The same for a custom op of PyTorch."""


class PairGradients(NamedTuple):
    """Gradients and coefficients that backward of a pair computes.

    The tables' gradients follow: `segment_accumulate` of `products` with x, and of `coef` with the gradient of the
    result.
    """

    scores: Tensor
    """[T, J, C]."""
    products: Tensor
    """[T, J]."""
    coef: Tensor
    """[T, J, C], the coefficients of the values again."""
    x: Tensor
    """[T, P]."""


class Pair(NamedTuple):
    """An implementation, without autograd."""

    forward: Callable[[PairOperands], tuple[Tensor, Tensor]]
    """The result, [T, B V], and the products, [T, J], for backward: in fp32 (fp64), or the dtype of x."""
    gradients: Callable[[PairOperands, Tensor, Tensor], PairGradients]
    """From the products and the gradient of the result, [T, B V], contiguous."""
