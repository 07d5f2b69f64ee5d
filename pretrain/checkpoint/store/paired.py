"""A checkpoint seen through pairs: tensors of one format, read from another's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from pretrain.checkpoint.store.tensors import (
    Pair,
    Region,
    TensorInfo,
    TensorReader,
    overlap,
    slices_in,
)
from pretrain.errors import CheckpointError
from pretrain.rectangles import rectangles_of_range


class PairedReader:
    """Tensors made of another checkpoint's, without holding any of them.

    Where several pairs give an element, the first pair's is read.
    """

    def __init__(self, pairs: Iterable[Pair], source: TensorReader) -> None:
        """Read tensors by `ours` of the pairs, from `theirs` in `source`.

        Raises:
            CheckpointError: the source lacks a tensor, or has another shape than the pairs say.
        """
        self._source = source
        self._pairs: dict[str, list[Pair]] = {}
        for pair in pairs:
            self._pairs.setdefault(pair.ours.name, []).append(pair)
        self._tensors = {name: self._info(name) for name in self._pairs}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorReader`."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`.

        Raises:
            CheckpointError: no pair gives some of it, or the source cannot be read.
        """
        info = self._tensors.get(region.name)
        if info is None:
            raise CheckpointError(f"there is no tensor {region.name}")
        result = torch.empty(region.shape, dtype=info.dtype)
        missing = [region]
        for pair in self._pairs[region.name]:
            rest = []
            for wanted in missing:
                part = overlap(wanted, pair.ours)
                if part is None:
                    rest.append(wanted)
                    continue
                for target, sources in corresponding(pair, part):
                    parts = [self._source.read(source) for source in sources]
                    whole = parts[0] if len(parts) == 1 else torch.cat([each.view(-1) for each in parts])
                    result[slices_in(target, region)].copy_(whole.view(target.shape))
                rest.extend(_without(wanted, part))
            missing = rest
        if region.numel and missing:
            raise CheckpointError(f"{missing[0]} is in no tensor of the source")
        return result

    def _info(self, name: str) -> TensorInfo:
        pairs = self._pairs[name]
        dtypes = set()
        for pair in pairs:
            found = self._source.tensors.get(pair.theirs.name)
            if found is None:
                raise CheckpointError(f"{pair.theirs.name} is missing, from which {name} is made")
            ends = [start + size for start, size in zip(pair.theirs.offset, pair.theirs.shape, strict=True)]
            if len(found.shape) != len(ends) or any(end > size for end, size in zip(ends, found.shape, strict=True)):
                raise CheckpointError(
                    f"{pair.theirs.name} has shape {found.shape}, and {name} needs it up to {tuple(ends)}: the two are "
                    "not of the same model"
                )
            dtypes.add(found.dtype)
        if len(dtypes) > 1:
            raise CheckpointError(f"{name} is made of tensors of several dtypes: {sorted(map(str, dtypes))}")
        return TensorInfo(extent(pair.ours for pair in pairs), dtypes.pop())


def extent(regions: Iterable[Region]) -> tuple[int, ...]:
    """The shape of the smallest tensor that has all of these regions."""
    ends = [tuple(start + size for start, size in zip(each.offset, each.shape, strict=True)) for each in regions]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def shapes_of(regions: Iterable[Region]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that these regions fill, by name, in the order of their first regions."""
    by_name: dict[str, list[Region]] = {}
    for region in regions:
        by_name.setdefault(region.name, []).append(region)
    return {name: extent(found) for name, found in by_name.items()}


def corresponding(pair: Pair, part: Region) -> Iterator[tuple[Region, list[Region]]]:
    """A part of `pair.ours` in rectangles, each with rectangles of `pair.theirs` that hold its elements in order."""
    inside = tuple(start - first for start, first in zip(part.offset, pair.ours.offset, strict=True))
    kept = [dim for dim, size in enumerate(pair.ours.shape) if size != 1]
    other = [dim for dim, size in enumerate(pair.theirs.shape) if size != 1]
    if [pair.ours.shape[dim] for dim in kept] == [pair.theirs.shape[dim] for dim in other]:
        by, shape = [0] * len(pair.theirs.shape), [1] * len(pair.theirs.shape)
        for ours, theirs in zip(kept, other, strict=True):
            by[theirs], shape[theirs] = inside[ours], part.shape[ours]
        yield part, [pair.theirs.shifted(tuple(by), tuple(shape))]
        return
    for start, run in _runs(inside, part.shape, pair.ours.shape):
        begin = sum(index * math.prod(pair.ours.shape[dim + 1 :]) for dim, index in enumerate(start))
        found = rectangles_of_range(pair.theirs.shape, begin, begin + math.prod(run))
        yield pair.ours.shifted(start, run), [pair.theirs.shifted(each.offset, each.shape) for each in found]


def _runs(
    offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A rectangle of a tensor in parts that are contiguous in the tensor's flattened form: their offsets and shapes."""
    last = max((dim for dim in range(len(shape)) if shape[dim] != whole[dim]), default=0)
    for index in itertools.product(
        *[range(start, start + size) for start, size in zip(offset, shape, strict=True)][:last]
    ):
        yield (*index, *offset[last:]), (*(1,) * last, *shape[last:])


def _without(region: Region, part: Region) -> Iterator[Region]:
    """The rest of a region without a part of it, in rectangles."""
    offset, shape = list(region.offset), list(region.shape)
    for dim, (start, size) in enumerate(zip(part.offset, part.shape, strict=True)):
        before, after = start - offset[dim], offset[dim] + shape[dim] - start - size
        for first, count in ((offset[dim], before), (start + size, after)):
            if count:
                yield Region(
                    region.name,
                    (*offset[:dim], first, *offset[dim + 1 :]),
                    (*shape[:dim], count, *shape[dim + 1 :]),
                )
        offset[dim], shape[dim] = start, size
