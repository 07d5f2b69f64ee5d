"""Ranges of flattened tensors as rectangles: what a rank holds of optimizer state, and what files hold of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a tensor that is contiguous in its flattened form.

    Attributes:
        offset: start of the rectangle, per dimension.
        shape: its size, per dimension.
        flat_start: place of its first element in the flattened tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat_start: int


def rectangles_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """The positions start..stop-1 of a flattened tensor as rectangles, in order: at most 2 N - 1 for N dimensions."""
    row_size = math.prod(shape[1:])
    position = start
    while position < stop:
        row, within = divmod(position, row_size)
        if within == 0 and stop - position >= row_size:
            num_rows = (stop - position) // row_size
            yield Rectangle((row, *(0,) * (len(shape) - 1)), (num_rows, *shape[1:]), position)
            position += num_rows * row_size
        else:
            end_within = min(row_size, stop - row * row_size)
            for inner in rectangles_of_range(shape[1:], within, end_within):
                yield Rectangle((row, *inner.offset), (1, *inner.shape), row * row_size + inner.flat_start)
            position = row * row_size + end_within
