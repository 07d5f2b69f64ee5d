"""A checkpoint's index: its tensors, and for each of their parts the file and the place in it.

On disk it is what PyTorch's distributed checkpoints have, a pickled `Metadata` named `.metadata`. Here it becomes plain
values that hold together: every part lies inside of its tensor and inside of a file of this folder, and takes as many
bytes there as its elements need. So a reader that allocates by the index allocates no more than there is on disk.
PyTorch is not imported: its import takes longer than all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from reprlib import repr as short
from typing import Any

from pretrain.checkpoint.index_pickle import DTYPE_BYTES, TensorRecord, unpickled_index
from pretrain.checkpoint.store.tensors import Region, TensorInfo
from pretrain.errors import CheckpointError
from pretrain.printable import printable

INDEX_FILE = ".metadata"
_MOST_DIMENSIONS = 16
_MOST_ELEMENTS = 1 << 60
_MOST_OF_A_NAME = 80


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's global shape, and PyTorch's name of its dtype: all that can be said without PyTorch."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredObject:
    """Something that `torch.save` wrote into a file.

    Attributes:
        file: name of the file in the checkpoint's folder.
        start: first byte of it in the file.
        num_bytes: bytes of it, the envelope of `torch.save` included.
    """

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class StoredItem(StoredObject):
    """A part of a tensor.

    Attributes:
        region: its tensor and its place in it.
    """

    region: Region


@dataclass(frozen=True)
class Index:
    """Tensors of a checkpoint and the parts that they are stored in.

    Attributes:
        stored: global shapes and dtypes, by name.
        items: the parts of each tensor, which do not overlap, by name.
        objects: objects that are no tensors, and were written by other programs, by name.
    """

    stored: Mapping[str, StoredTensor]
    items: Mapping[str, tuple[StoredItem, ...]]
    objects: Mapping[str, StoredObject]

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Global shapes and PyTorch's dtypes, by name."""
        import torch

        return {name: TensorInfo(each.shape, getattr(torch, each.dtype)) for name, each in self.stored.items()}


def read_index(folder: Path) -> Index:
    """A checkpoint's index, read without running anything it could hold and before any tensor is.

    Raises:
        CheckpointError: the index is missing or damaged, refers to anything but an index's classes, contradicts itself,
            or speaks of more than the files of the folder can hold.
    """
    try:
        return _index_of(unpickled_index((folder / INDEX_FILE).read_bytes()), folder)
    # Damaged bytes make an unpickler raise anything, and give its records any fields.
    except Exception as error:
        raise CheckpointError(
            f"{folder}/{INDEX_FILE} is not a checkpoint index that can be trusted: {error}"
        ) from error


def _index_of(record: Any, folder: Path) -> Index:
    """An index as plain values, after looking whether they can be.

    Raises:
        ValueError: the record contradicts itself, or the files of the folder.
    """
    sizes: dict[str, int] = {}
    places = {(key.fqn, tuple(key.offset or ())): place for key, place in (record.storage_data or {}).items()}
    tensors: dict[str, StoredTensor] = {}
    items: dict[str, tuple[StoredItem, ...]] = {}
    objects: dict[str, StoredObject] = {}
    for name, entry in record.state_dict_metadata.items():
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"it names something {printable(name, _MOST_OF_A_NAME)}")
        if not isinstance(entry, TensorRecord):
            objects[name] = _object(name, places.get((name, ())), folder, sizes)
            continue
        tensors[name] = StoredTensor(_extent(name, entry.size), entry.properties.dtype)
        items[name] = tuple(_item(name, tensors[name], part, places, folder, sizes) for part in entry.chunks)
        total = sum(item.region.numel for item in items[name])
        if total > math.prod(tensors[name].shape):
            raise ValueError(f"the parts of {name} have {total} elements, more than its shape {tensors[name].shape}")
    return Index(tensors, items, objects)


def _item(
    name: str,
    tensor: StoredTensor,
    part: Any,
    places: Mapping[tuple[str, tuple[int, ...]], Any],
    folder: Path,
    sizes: dict[str, int],
) -> StoredItem:
    """One part; `sizes` remembers the sizes of files."""
    region = Region(name, _extent(name, part.offsets), _extent(name, part.sizes))
    inside = len(region.offset) == len(region.shape) == len(tensor.shape) and all(
        start + size <= whole for start, size, whole in zip(region.offset, region.shape, tensor.shape, strict=True)
    )
    if not inside:
        raise ValueError(f"a part of {name}, {region.offset} + {region.shape}, is not inside of {tensor.shape}")
    where = _object(name, places.get((name, region.offset)), folder, sizes)
    if region.numel * DTYPE_BYTES[tensor.dtype] > where.num_bytes:
        raise ValueError(
            f"a part of {name} has {region.numel} elements of torch.{tensor.dtype} in {where.num_bytes} bytes"
        )
    return StoredItem(where.file, where.start, where.num_bytes, region)


def _object(name: str, place: Any, folder: Path, sizes: dict[str, int]) -> StoredObject:
    """Place in a file, given its record; `sizes` remembers the sizes of files."""
    if place is None:
        raise ValueError(f"a part of {name} is in no file")
    file, start, num_bytes = place.relative_path, place.offset, place.length
    if not isinstance(file, str) or file != Path(file).name or file in (".", ".."):
        raise ValueError(f"{name} would be in {file!r}, which is no file of this folder")
    if place.transform_descriptors:
        raise ValueError(f"{name} was written through {short(place.transform_descriptors)}, which nothing here undoes")
    if file not in sizes:
        sizes[file] = (folder / file).stat().st_size
    if not (0 <= start <= start + num_bytes <= sizes[file]):
        raise ValueError(f"a part of {name} would be at {start} + {num_bytes} of {file}, which has {sizes[file]} bytes")
    return StoredObject(file, start, num_bytes)


def _extent(name: str, numbers: Any) -> tuple[int, ...]:
    """A shape or an offset that can be one."""
    extent = tuple(numbers)
    if len(extent) > _MOST_DIMENSIONS or not all(type(number) is int and number >= 0 for number in extent):
        raise ValueError(f"{name} has the shape or offset {short(extent)}")
    if math.prod(extent) > _MOST_ELEMENTS:
        raise ValueError(f"{name} has the shape or offset {short(extent)}, larger than any memory")
    return extent
