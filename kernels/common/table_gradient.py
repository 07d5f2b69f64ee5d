"""Gradients that lookups of a table go to, where autograd is not to have them: one object per table."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.common.joined_lookups import Lookup

_ATTRIBUTE = "_megamem_gradient"


class TableGradient(Protocol):
    """The gradient of a table: dense and Megatron's (`kernels.common.main_grad`), or the rows that were read
    (`kernels.common.row_gradient`)."""

    def add(self, lookup: Lookup) -> Tensor | None:
        """Take a lookup's part of the gradient, and give what autograd gets for the table; None: nothing."""
        ...


def gradient_of(table: Tensor) -> TableGradient | None:
    """A table's own gradient; None: it has none."""
    found: TableGradient | None = getattr(table, _ATTRIBUTE, None)
    return found


def give_gradient(table: Tensor, gradient: TableGradient) -> None:
    """Have lookups of a table go to this gradient from now on."""
    setattr(table, _ATTRIBUTE, gradient)
