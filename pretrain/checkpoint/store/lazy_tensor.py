"""A tensor whose elements stay in their file until a region of it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from pretrain.checkpoint.store.tensors import TensorInfo
from pretrain.errors import CheckpointError

# Elements between two rows of a region are read with it, and dropped, up to this many bytes at a time.
_SPAN_BYTES = 8 << 20
# With shorter gaps, a seek costs more than reading the gap.
_WORTH_A_SEEK_BYTES = 64 << 10


@dataclass(frozen=True)
class LazyTensor:
    """A strided tensor in a file. Holds no open file, so it may be read by threads and forked processes.

    Attributes:
        shape: its size, per dimension.
        dtype: type of its elements, little-endian.
        strides: elements between neighbours, per dimension.
        path: the file.
        start: place of its first element in the file, in bytes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    path: Path
    start: int

    @property
    def info(self) -> TensorInfo:
        """Its shape and dtype."""
        return TensorInfo(self.shape, self.dtype)

    def __setstate__(self, state: object) -> None:
        # A pickle that holds a tensor could otherwise give it another path.
        raise TypeError("a tensor in a file cannot be changed")

    def read(self, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """A rectangle of it; all of it by default.

        Args:
            offset: start of the rectangle, per dimension.
            shape: its size, per dimension.

        Returns:
            A contiguous tensor on the CPU, the caller's own.

        Raises:
            CheckpointError: the file is gone, or shorter than it was.
            ValueError: the rectangle is not inside of the tensor.
        """
        offset = (0,) * len(self.shape) if offset is None else offset
        shape = self.shape if shape is None else shape
        inside = all(
            min(first, size) >= 0 and first + size <= whole
            for first, size, whole in zip(offset, shape, self.shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{shape} elements from {offset} on are not inside of a tensor of {self.shape}")
        result = torch.empty(shape, dtype=self.dtype)
        if result.numel():
            first = sum(index * stride for index, stride in zip(offset, self.strides, strict=True))
            # Outermost in the file first, so that adjacent elements are read at once.
            order = sorted(range(len(shape)), key=lambda dim: (-self.strides[dim], dim))
            try:
                with self.path.open("rb", buffering=0) as file:
                    self._fill(file, result.permute(order), [self.strides[dim] for dim in order], first)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error
        return result

    def _fill(self, file: BinaryIO, out: Tensor, strides: list[int], first: int) -> None:
        """Read from the first element on into a view of the result whose dimensions are in the file's order."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, strides, strict=True))
        if span == out.numel() and out.is_contiguous():
            _read_into(file, out, self.path, self.start + first * self.dtype.itemsize)
        elif span * self.dtype.itemsize <= _SPAN_BYTES and (
            span <= 2 * out.numel() or out.dim() == 1 or strides[0] * self.dtype.itemsize <= _WORTH_A_SEEK_BYTES
        ):
            buffer = torch.empty(span, dtype=self.dtype)
            _read_into(file, buffer, self.path, self.start + first * self.dtype.itemsize)
            out.copy_(buffer.as_strided(out.shape, strides))
        elif out.shape[0] > 1 and strides[0] * self.dtype.itemsize <= _WORTH_A_SEEK_BYTES:
            # Short rows with gaps: as many at a time as the span allows.
            step = max(1, min(_SPAN_BYTES // (strides[0] * self.dtype.itemsize), out.shape[0] - 1))
            for index in range(0, out.shape[0], step):
                self._fill(file, out[index : index + step], strides, first + index * strides[0])
        elif out.dim() > 1:
            for index in range(out.shape[0]):
                self._fill(file, out[index], strides[1:], first + index * strides[0])
        else:
            for index in range(out.shape[0]):
                self._fill(file, out[index : index + 1], strides, first + index * strides[0])


def memory_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's bytes."""
    # The stride of a dimension of one element may keep `view` from it.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _read_into(file: BinaryIO, out: Tensor, path: Path, start: int) -> None:
    """Fill a contiguous tensor with the file's bytes from `start` on."""
    view = memory_of(out)
    file.seek(start)
    while view:
        # One call reads 2 GiB at most.
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} is shorter than it was: {len(view)} bytes before {file.tell()} are missing")
        view = view[count:]


def fits(shape: tuple[int, ...], strides: tuple[int, ...], first: int, stored: int) -> bool:
    """True if a strided tensor lies inside of a number of stored elements and repeats none of them.

    Args:
        shape: shape of the tensor.
        strides: strides of the tensor, in elements.
        first: its first element's number.
        stored: elements that there are.
    """
    if len(shape) != len(strides) or min((first, *shape, *strides), default=0) < 0:
        return False
    numel = math.prod(shape)
    if numel == 0:
        return True
    last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return last < stored and numel <= stored
