"""What a pair of gathers reads, and what an implementation of it consists of.

Legend: R table rows, T tokens, J rows read per token, C scores per row, P pre-value columns, V value columns (C divides V), B blocks of entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

Activation: TypeAlias = Literal["none", "gelu"]
"""Of the products: none (UltraMemV2, Eq. 15) or the exact gelu (Eq. 13, PEER)."""


class PairOperands(NamedTuple):
    """The operands of `gather_pair` in their order: the arguments of `kernels.gather_pair.naive.gather_pair`, whose docstring gives shapes."""

    pre_values: Tensor
    values: Tensor
    ids: Tensor
    x: Tensor
    scores: Tensor
    activation: Activation = "none"
    block: Tensor | None = None
    num_blocks: int = 1


SCHEMA = "Tensor pre_values, Tensor values, Tensor ids, Tensor x, Tensor scores, str activation, Tensor? block, int num_blocks"
"""The same for a custom op of PyTorch."""


class PairGradients(NamedTuple):
    """What backward of a pair gathers. The gradients of the tables are `segment_accumulate` of `products` with x, and of `coef` with that of the result."""

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
