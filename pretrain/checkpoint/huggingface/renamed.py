"""A checkpoint under the other names: what a list of pairs makes of a reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pretrain.checkpoint.store.tensors import Pair, Region, TensorInfo, TensorReader, overlap
from pretrain.errors import CheckpointError


class RenamedReader:
    """A `TensorReader` of the tensors on one side of pairs, whose elements are read from the other side.

    Elements that no pair has are 0: the padding of a vocabulary.
    """

    def __init__(self, source: TensorReader, pairs: Iterable[Pair], tensors: Mapping[str, TensorInfo]) -> None:
        """
        Args:
            source: has their side.
            pairs: of rectangles of equal shape; our side is what is shown.
            tensors: what is shown, by name: see `shown_tensors`.
        """
        self._source, self._tensors = source, tensors
        self._pairs: dict[str, list[Pair]] = {}
        for pair in pairs:
            assert pair.ours.shape == pair.theirs.shape
            self._pairs.setdefault(pair.ours.name, []).append(pair)
        assert self._pairs.keys() == tensors.keys()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is shown, by name."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader.read`."""
        if region.name not in self._tensors:
            raise CheckpointError(f"there is no tensor {region.name}")
        out = torch.zeros(region.shape, dtype=self._tensors[region.name].dtype)
        for pair in self._pairs[region.name]:
            common = overlap(region, pair.ours)
            if common is None:
                continue
            by = tuple(a - b for a, b in zip(common.offset, pair.ours.offset, strict=True))
            place = tuple(
                slice(a - b, a - b + size)
                for a, b, size in zip(common.offset, region.offset, common.shape, strict=True)
            )
            out[place] = self._source.read(pair.theirs.shifted(by, common.shape))
        return out


def shown_tensors(
    pairs: Iterable[Pair], source: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, TensorInfo]:
    """Shapes and dtypes of the tensors on our side of pairs.

    Args:
        pairs: in the order in which their tensors are wanted.
        source: the tensors on their side.
        shapes: of those that are larger than their pairs.

    Raises:
        CheckpointError: a tensor of their side is missing, or smaller than its pairs.
    """
    needed: dict[str, tuple[int, ...]] = {}
    shown: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for pair in pairs:
        needed[pair.theirs.name] = _enclosing(needed.get(pair.theirs.name), pair.theirs)
        if pair.theirs.name not in source:
            raise CheckpointError(f"the checkpoint has no tensor {pair.theirs.name}, which its configuration asks for")
        before, _ = shown.get(pair.ours.name, (None, None))
        shown[pair.ours.name] = _enclosing(before, pair.ours), source[pair.theirs.name].dtype
    for name, shape in needed.items():
        found = source[name].shape
        if len(found) != len(shape) or any(a < b for a, b in zip(found, shape, strict=True)):
            raise CheckpointError(f"the checkpoint's {name} has the shape {found}, and its configuration says {shape}")
    return {name: TensorInfo((shapes or {}).get(name, shape), dtype) for name, (shape, dtype) in shown.items()}


def _enclosing(shape: tuple[int, ...] | None, region: Region) -> tuple[int, ...]:
    ends = tuple(start + size for start, size in zip(region.offset, region.shape, strict=True))
    return ends if shape is None else tuple(map(max, shape, ends))
