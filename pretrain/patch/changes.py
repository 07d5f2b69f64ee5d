"""Sizes of the changes that a patch makes to its rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from pretrain.patch.file import Patch, Side, slices

_ELEMENTS_AT_ONCE = 2**20
_ROW_NUMBER_BYTES = 8


@dataclass(frozen=True)
class RowChange:
    """Change of a table's rows in a patch.

    Attributes:
        num_bytes: bytes of the rows in the patch.
        largest: largest change of an element; not finite where an element is not.
        rms: root of the mean square of all elements' changes.
    """

    num_bytes: int
    largest: float
    rms: float


def change_of(patch: Patch, table: str) -> RowChange:
    """Change of the rows of one table."""
    num_rows, width = patch.num_rows(table), patch.about.shapes[table][1]
    element_bytes = sum(patch.dtype(side, table).itemsize for side in get_args(Side))
    largest, squares = 0.0, 0.0
    for start, stop in slices(num_rows, _ELEMENTS_AT_ONCE // max(1, width)):
        apart = patch.read("after", table, start, stop).double() - patch.read("before", table, start, stop).double()
        squares += float(apart.square().sum())
        # `max` of Python loses NaN.
        most = float(apart.abs().max()) if apart.numel() else 0.0
        largest = most if math.isnan(most) else max(largest, most)
        if math.isnan(most):
            squares = math.nan
    num_bytes = num_rows * (width * element_bytes + _ROW_NUMBER_BYTES)
    return RowChange(num_bytes, largest, math.sqrt(squares / max(1, num_rows * width)))
