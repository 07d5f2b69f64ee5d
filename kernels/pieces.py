"""What an implementation of the memory kernels consists of: two gathers, their pair, and a scatter, without autograd.

Both differentiable gathers are made of the first two and the last (`kernels/gather_sum/op.py`, `kernels/gather_dot/op.py`): the coefficient
gradient of `gather_sum` is `dot_rows`, the vector gradient of `gather_dot` is `sum_rows`, and the table gradient of both is `accumulate`. The
pair has a backward pass of its own (`kernels/gather_pair/op.py`). What wraps one of them and builds the ops anew, as the step benchmark does,
takes them from `Kernels.pieces`.

Legend: R table rows, T tokens, J rows read per token, C column groups, W columns (C divides W), B blocks of entries. Of pairs: P pre-value
columns, V value columns (C divides V).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.gather_pair.weighting import Activation


class SumRows(Protocol):
    """out[t, b, group c] = sum_{j: block[t, j] = b} coef[t, j, c] table[ids[t, j], group c], summed in fp32 (fp64 for fp64 tables)."""

    def __call__(
        self, table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None = None, num_blocks: int = 1
    ) -> Tensor:
        """Sums of rows.

        Args:
            table: [R, W], contiguous.
            ids: [T, J], int64 in [0, R).
            coef: [T, J, C].
            block: [T, J], int64 in [0, B), or None if B is 1.
            num_blocks: B.

        Returns:
            [T, B W], the table's dtype.
        """
        ...


class DotRows(Protocol):
    """out[t, j, c] = <table[ids[t, j], group c], x[t, block[t, j], group c]>, summed in fp32 (fp64 for fp64 tables)."""

    def __call__(self, table: Tensor, ids: Tensor, x: Tensor, num_groups: int, block: Tensor | None = None) -> Tensor:
        """Products of rows.

        Args:
            table: [R, W], contiguous.
            ids: [T, J], int64 in [0, R).
            x: [T, B W].
            num_groups: C.
            block: [T, J], int64 in [0, B), or None if B is 1.

        Returns:
            [T, J, C], the dtype of `x`.
        """
        ...


class Accumulate(Protocol):
    """accumulator[ids[t, j], group c] += coef[t, j, c] vec[t, block[t, j], group c], the same bits in every run."""

    def __call__(
        self, accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, block: Tensor | None = None
    ) -> None:
        """Adds in place.

        Args:
            accumulator: [R, W], contiguous; fp32 in training (Megatron's main_grad).
            ids: [T, J], int64 in [0, R).
            coef: [T, J, C].
            vec: [T, B W].
            block: [T, J], int64 in [0, B), or None if B is 1.
        """
        ...


class PairOfRows(Protocol):
    """products[t, j] = <pre_values[ids[t, j]], x[t]>, and out[t, b, group c] = sum_{j: block[t, j] = b} coef[t, j, c] values[ids[t, j], group c]
    with coef[t, j, c] = scores[t, j, c] act(products[t, j])."""

    def __call__(
        self,
        pre_values: Tensor,
        values: Tensor,
        ids: Tensor,
        x: Tensor,
        scores: Tensor,
        activation: Activation,
        block: Tensor | None = None,
        num_blocks: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Products and sums of rows.

        Args:
            pre_values: [R, P], contiguous.
            values: [R, V], contiguous.
            ids: [T, J], int64 in [0, R).
            x: [T, P].
            scores: [T, J, C].
            activation: act.
            block: [T, J], int64 in [0, B), or None if B is 1.
            num_blocks: B.

        Returns:
            out, [T, B V], the values' dtype; products, [T, J], for backward: in fp32 (fp64), or the dtype of `x`.
        """
        ...


class PairGradients(Protocol):
    """What backward of the pair gathers; see `kernels.gather_pair.triton_kernel.gather_pair_gradients_kernel` for the formulas."""

    def __call__(
        self,
        pre_values: Tensor,
        values: Tensor,
        ids: Tensor,
        scores: Tensor,
        products: Tensor,
        grad_out: Tensor,
        activation: Activation,
        block: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients, and the coefficients again.

        Args:
            pre_values, values, ids, scores, activation, block: as in forward.
            products: [T, J], from forward.
            grad_out: [T, B V], contiguous.

        Returns:
            The gradients of the scores, [T, J, C], and of the products, [T, J]; the coefficients of the values, [T, J, C]; the gradient of
            x, [T, P]. Those of the tables are `accumulate` of the second with x, and of the third with `grad_out`.
        """
        ...


def check_contiguous(rows: Tensor) -> None:
    """Refuses tables whose rows a kernel would not find.

    Raises:
        ValueError: they are not contiguous.
    """
    if not rows.is_contiguous():
        raise ValueError(f"the table's strides are {rows.stride()}: the memory kernels need contiguous rows")


def empty_sums(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None, num_blocks: int) -> Tensor:
    """Room for what `SumRows` returns, and all of it that `torch.compile` wants to know."""
    return table.new_empty(ids.shape[0], num_blocks * table.shape[1])


def empty_products(table: Tensor, ids: Tensor, x: Tensor, num_groups: int, block: Tensor | None) -> Tensor:
    """The same of `DotRows`."""
    return x.new_empty(*ids.shape, num_groups)


@dataclass(frozen=True)
class Pieces:
    """One implementation of each."""

    sum_rows: SumRows
    dot_rows: DotRows
    pair: PairOfRows
    pair_gradients: PairGradients
    accumulate: Accumulate


class Gather(Protocol):
    """The signature of both differentiable gathers: (table, ids, coef or x), and the block of each entry where there is more than one."""

    def __call__(
        self, table: Tensor, ids: Tensor, operand: Tensor, /, block: Tensor | None = None, num_blocks: int = 1
    ) -> Tensor: ...


class GatherPair(Protocol):
    """The signature of the differentiable pair, that of `kernels.gather_pair.naive.gather_pair`."""

    def __call__(
        self,
        pre_values: Tensor,
        values: Tensor,
        ids: Tensor,
        x: Tensor,
        scores: Tensor,
        /,
        activation: Activation = "none",
        block: Tensor | None = None,
        num_blocks: int = 1,
    ) -> Tensor: ...
