"""What an implementation of the memory kernels consists of: two gathers and a scatter, without autograd.

Both differentiable gathers are made of these three (`kernels/gather_sum/op.py`, `kernels/gather_dot/op.py`): the coefficient gradient of
`gather_sum` is `dot_rows`, the vector gradient of `gather_dot` is `sum_rows`, and the table gradient of both is `accumulate`. What wraps one
of them and builds the gathers anew, as the step benchmark does, takes them from `Kernels.pieces`.

Legend: R table rows, T tokens, J rows read per token, C column groups, W columns (C divides W), B blocks of entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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


@dataclass(frozen=True)
class Pieces:
    """One implementation of each."""

    sum_rows: SumRows
    dot_rows: DotRows
    accumulate: Accumulate


class Gather(Protocol):
    """The signature of both differentiable gathers: (table, ids, coef or x), and the block of each entry where there is more than one."""

    def __call__(
        self, table: Tensor, ids: Tensor, operand: Tensor, /, block: Tensor | None = None, num_blocks: int = 1
    ) -> Tensor: ...
