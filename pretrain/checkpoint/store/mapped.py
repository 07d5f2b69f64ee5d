"""A checkpoint under other names, in other pieces or in another dtype, read through to the one that there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pretrain.checkpoint.store.tensors import Pair, Region, TensorInfo, TensorReader, overlap
from pretrain.errors import CheckpointError


class MappedReader:
    """The tensors of `pair.theirs`, whose elements are those of `pair.ours` in another reader."""

    def __init__(self, source: TensorReader, pairs: Iterable[Pair], tensors: Mapping[str, TensorInfo]) -> None:
        """
        Args:
            source: of the tensors that `ours` names.
            pairs: whose `theirs` cover what can be read.
            tensors: what can be read: the dtype is that of the result, whatever the source's.
        """
        self._source, self._tensors = source, tensors
        self._pairs: dict[str, list[Pair]] = {}
        for pair in pairs:
            self._pairs.setdefault(pair.theirs.name, []).append(pair)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is there, by name."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        result = torch.empty(region.shape, dtype=self._tensors[region.name].dtype)
        found = 0
        for pair in self._pairs.get(region.name, ()):
            common = overlap(pair.theirs, region)
            if common is None:
                continue
            inner = tuple(a - b for a, b in zip(common.offset, pair.theirs.offset, strict=True))
            outer = tuple(a - b for a, b in zip(common.offset, region.offset, strict=True))
            part = self._read_pair(pair, inner, common.shape)
            result[tuple(slice(a, a + size) for a, size in zip(outer, common.shape, strict=True))] = part
            found += common.numel
        if found != region.numel:
            raise CheckpointError(
                f"of {region.numel} elements of {region.name} at {region.offset}, {found} are there under other names: "
                "this checkpoint is not of the model that its configuration says"
            )
        return result

    def _read_pair(self, pair: Pair, inner: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The rectangle of this size at `inner` of a pair."""
        theirs, ours = pair.theirs.shape, pair.ours.shape
        if theirs == ours:
            return self._source.read(pair.ours.shifted(inner, shape))
        if theirs == _without_ones(ours, len(theirs)):
            # One of a stack: the first dimensions are of one element.
            ones = len(ours) - len(theirs)
            return self._source.read(pair.ours.shifted((0,) * ones + inner, (1,) * ones + shape)).reshape(shape)
        if ours == _without_ones(theirs, len(ours)):
            ones = len(theirs) - len(ours)
            return self._source.read(pair.ours.shifted(inner[ones:], shape[ones:])).reshape(shape)
        # Anything else is small: keys, cores and gains. Tables and matrices keep their shape.
        whole = self._source.read(pair.ours).reshape(theirs)
        return whole[tuple(slice(a, a + size) for a, size in zip(inner, shape, strict=True))]


def _without_ones(shape: tuple[int, ...], length: int) -> tuple[int, ...] | None:
    """The last dimensions of a shape, if all before them are of one element."""
    before = len(shape) - length
    return shape[before:] if before > 0 and set(shape[:before]) == {1} else None


class Selected:
    """Some of a reader's tensors, under their names or others, and in their dtype or another."""

    def __init__(
        self, source: TensorReader, names: Mapping[str, str], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        """
        Args:
            source: of the tensors.
            names: what each is called there, by what it is called here.
            dtypes: what is read in another dtype than the source's, by the name here.
        """
        self._source, self._names = source, names
        casts = dtypes or {}
        self._tensors = {
            name: TensorInfo(source.tensors[there].shape, casts.get(name, source.tensors[there].dtype))
            for name, there in names.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is there, by name."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        if region.name not in self._names:
            raise CheckpointError(f"there is no tensor {region.name} in this checkpoint")
        there = Region(self._names[region.name], region.offset, region.shape)
        return self._source.read(there).to(self._tensors[region.name].dtype)
