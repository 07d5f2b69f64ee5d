"""`row_squares`: its signature, and the function in PyTorch and in C++. Updates have no gradient.

Legend: N rows, W columns.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.common.ops import custom_op
from kernels.common.slices import token_slices

NUM_SUMS = 32
"""Partial sums of a row, part of the order of additions."""


class RowSquares(Protocol):
    """See `kernels.row_squares.naive.row_squares`. Gradients are contiguous."""

    def __call__(self, gradient: Tensor, /) -> Tensor: ...


def empty_result(gradient: Tensor) -> Tensor:
    """The result, not filled yet; also the ops' fake for `torch.compile`."""
    return gradient.new_empty(gradient.shape[0], dtype=torch.float32)


def torch_row_squares(gradient: Tensor) -> Tensor:
    """The function of `kernels.row_squares.naive.row_squares`, in slices of rows."""
    num_rows, width = gradient.shape
    squares = empty_result(gradient)
    for rows in token_slices(num_rows, width):
        terms = gradient[rows].float().square()
        sums = terms.new_zeros(len(terms), NUM_SUMS)
        for part in terms.split(NUM_SUMS, dim=1):
            sums[:, : part.shape[1]] += part
        half = NUM_SUMS // 2
        while half:
            sums = sums[:, :half] + sums[:, half:]
            half //= 2
        squares[rows] = sums[:, 0]
    return squares


@custom_op("cpu_row_squares", empty_result)
def cpu_row_squares(gradient: Tensor) -> Tensor:
    """`row_squares` in C++, as a custom op: `torch.compile` takes it as it is."""
    types, gradient = cpp.types_of(gradient, gradient)
    squares = empty_result(gradient)
    cpp.call("row_squares", "row_squares", types, gradient, squares, *gradient.shape)
    return squares
