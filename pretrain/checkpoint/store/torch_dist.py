"""Reading Megatron's `torch_dist` format, which is PyTorch's distributed checkpoint: an index, and files of items.

Every item is one rectangle of one tensor as `torch.save` writes it. The index gives its file, its bytes there, and the
rectangle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.checkpoint.index import Index, StoredItem, read_index
from pretrain.checkpoint.store.tensors import Region, TensorInfo, overlap, slices_in
from pretrain.checkpoint.store.torch_zip import LazyTensor, open_zip
from pretrain.errors import CheckpointError

_NUM_OPEN_ITEMS = 256
"""Items whose place in their file is remembered."""


class TorchDistReader:
    """A `TensorReader` of a folder of this format."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self._tensors, self._parts, self._objects = index.tensors, index.items, index.objects
        self._item = lru_cache(_NUM_OPEN_ITEMS)(self.item)
        # [parts, dimensions] first positions, and those after the last, of every tensor's parts.
        self._edges = {
            name: (
                np.array([part.region.offset for part in parts], np.int64),
                np.array([np.add(part.region.offset, part.region.shape) for part in parts], np.int64),
            )
            for name, parts in self._parts.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shapes and dtypes of the tensors, by name."""
        return self._tensors

    def parts(self, name: str) -> Sequence[StoredItem]:
        """Stored parts of a tensor."""
        return self._parts[name]

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        if region.name not in self._tensors:
            raise CheckpointError(f"{self.folder} has no tensor {region.name}")
        result = torch.empty(region.shape, dtype=self._tensors[region.name].dtype)
        found = 0
        for part in self._parts_of(region):
            common = overlap(part.region, region)
            assert common is not None
            source = self._item(part).read(tuple(each.start for each in slices_in(common, part.region)), common.shape)
            result[slices_in(common, region)] = source
            found += common.numel
        if found != region.numel:
            raise CheckpointError(
                f"{self.folder} is damaged: of {region.numel} elements of {region.name} at {region.offset} it holds "
                f"{found}. Use another checkpoint"
            )
        return result

    def loaded(self, name: str) -> Any:
        """Read an object that is no tensor, and run nothing of it (see `open_zip`); None: there is none of this name.

        Raises:
            CheckpointError: the object is not where the index says.
        """
        place = self._objects.get(name)
        return None if place is None else open_zip(self.folder / place.file, place.start, place.num_bytes)

    def item(self, part: StoredItem) -> LazyTensor:
        """A part, without reading its elements.

        Raises:
            CheckpointError: the part is not where the index says.
        """
        item = open_zip(self.folder / part.file, part.start, part.num_bytes)
        expected = self._tensors[part.region.name].dtype
        if not isinstance(item, LazyTensor) or (item.shape, item.dtype) != (part.region.shape, expected):
            raise CheckpointError(
                f"{self.folder / part.file} is damaged: what is at byte {part.start} is not the part of "
                f"{part.region.name} that the index says"
            )
        return item

    def _parts_of(self, region: Region) -> Iterator[StoredItem]:
        starts, stops = self._edges[region.name]
        parts = self._parts[region.name]
        if not region.shape:
            yield from parts
        elif parts:
            low, high = np.array(region.offset), np.add(region.offset, region.shape)
            for index in np.flatnonzero(((starts < high) & (stops > low)).all(axis=1)).tolist():
                yield parts[index]


def open_torch_dist(folder: Path) -> TorchDistReader:
    """Open a checkpoint of this format.

    Raises:
        CheckpointError: the index is missing or damaged, or not to be trusted.
    """
    return TorchDistReader(folder, read_index(folder))
