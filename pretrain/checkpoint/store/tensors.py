"""Checkpoints of every format as named tensors, of which any region can be read.

A reader opens a checkpoint without reading tensors, and holds no more memory than the regions that it is asked for.
Code that converts, compares or checks a checkpoint sees this and no format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Region:
    """A rectangle of a named tensor.

    Attributes:
        name: name of the tensor.
        offset: start of the rectangle, per dimension.
        shape: its size, per dimension.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    def shifted(self, by: tuple[int, ...], shape: tuple[int, ...]) -> Region:
        """A rectangle inside of this one.

        Args:
            by: its start, as counted from this one's start.
            shape: its size.
        """
        return Region(self.name, tuple(a + b for a, b in zip(self.offset, by, strict=True)), shape)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self, name: str) -> Region:
        """All of it."""
        return Region(name, (0,) * len(self.shape), self.shape)


class TensorReader(Protocol):
    """An opened checkpoint. May be read by several threads and, once forked, by several processes."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shapes and dtypes of the tensors, by name."""
        ...

    def read(self, region: Region) -> Tensor:
        """A region of one tensor: contiguous, on the CPU, and the caller's own to write to.

        Raises:
            CheckpointError: the region is not there, or cannot be read.
        """
        ...


def pieces(region: Region, max_elements: int) -> Iterator[Region]:
    """Cut a region, along its first dimensions, into parts of a number of elements at most, in row-major order.

    Each is contiguous in the flattened region.
    """
    if region.numel <= max_elements or region.numel <= 1:
        yield region
        return
    row = math.prod(region.shape[1:])
    rest = (0,) * (len(region.shape) - 1)
    if row > max_elements:
        for index in range(region.shape[0]):
            # One row, and then within it.
            inner = Region(region.name, region.offset[1:], region.shape[1:])
            for part in pieces(inner, max_elements):
                yield Region(region.name, (region.offset[0] + index, *part.offset), (1, *part.shape))
        return
    rows = max_elements // row
    for start in range(0, region.shape[0], rows):
        yield region.shifted((start, *rest), (min(rows, region.shape[0] - start), *region.shape[1:]))


def overlap(first: Region, second: Region) -> Region | None:
    """Intersection of two regions of one tensor; None if it is empty."""
    starts = tuple(max(a, b) for a, b in zip(first.offset, second.offset, strict=True))
    stops = tuple(
        min(a + size_a, b + size_b)
        for a, size_a, b, size_b in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    )
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    return Region(first.name, starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def slices_in(inner: Region, outer: Region) -> tuple[slice, ...]:
    """Slices of a region in the tensor of an outer one that contains it."""
    return tuple(
        slice(start - first, start - first + size)
        for start, first, size in zip(inner.offset, outer.offset, inner.shape, strict=True)
    )


@dataclass(frozen=True)
class Pair:
    """Equal elements in two checkpoints: a rectangle of one of our tensors, and one of another format's.

    Both have the same elements in row-major order; their shapes may differ otherwise. A list of pairs goes both ways.
    """

    ours: Region
    theirs: Region


def inverted(pairs: Iterable[Pair]) -> list[Pair]:
    """Pairs as seen from the other side."""
    return [Pair(pair.theirs, pair.ours) for pair in pairs]
