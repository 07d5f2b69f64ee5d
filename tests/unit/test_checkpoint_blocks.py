"""A run of a flattened tensor is cut into rectangles that tile it."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pretrain.rectangles import rectangles_of_range


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape of 1 to 4 dimensions, and start <= stop in its flattened form."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


@given(ranges())
def test_blocks_are_contiguous_and_tile_the_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    positions = np.arange(math.prod(shape)).reshape(shape)
    covered: list[int] = []
    for block in rectangles_of_range(shape, start, stop):
        assert len(block.offset) == len(block.shape) == len(shape)
        assert all(size >= 1 for size in block.shape)
        rectangle = positions[tuple(slice(o, o + s) for o, s in zip(block.offset, block.shape, strict=True))]
        assert rectangle.shape == block.shape
        expected = range(block.flat_start, block.flat_start + math.prod(block.shape))
        assert rectangle.ravel().tolist() == list(expected)
        covered += expected
    assert covered == list(range(start, stop))


@given(ranges())
def test_there_are_few_blocks(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    assert len(list(rectangles_of_range(shape, start, stop))) <= 2 * len(shape) - 1


def test_whole_rows_are_one_block() -> None:
    (block,) = rectangles_of_range((1000, 64), 64 * 10, 64 * 900)
    assert (block.offset, block.shape, block.flat_start) == ((10, 0), (890, 64), 640)
