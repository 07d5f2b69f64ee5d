"""A checkpoint's index: which tensors there are, and in which file, where, each part of them is.

On disk it is what PyTorch's distributed checkpoints have, a pickled `Metadata` named `.metadata`; `safe_metadata` reads
the pickle. Here it becomes plain values that hold together: every part lies inside of its tensor and inside of a file
of this folder, and takes as many bytes there as its elements need. So whoever allocates what an index speaks of
allocates no more than there is on disk.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pretrain.checkpoint.store.tensors import Region, TensorInfo

INDEX_FILE = ".metadata"
# Of the format of PyTorch's checkpoints; its name there is not in all versions that we run with.
_PYTORCH_FORMAT = "1.0.0"
_MOST_DIMENSIONS = 16
_MOST_ELEMENTS = 1 << 60


@dataclass(frozen=True)
class StoredItem:
    """A part of a tensor as `torch.save` wrote it into a file.

    Attributes:
        region: what it is a part of, and which.
        file: name of the file in the checkpoint's folder.
        start: first byte of the item in the file.
        num_bytes: of the item, the envelope of `torch.save` included.
    """

    region: Region
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        tensors: global shapes and dtypes, by name.
        items: the parts of each tensor, which do not overlap, by name.
    """

    tensors: Mapping[str, TensorInfo]
    items: Mapping[str, tuple[StoredItem, ...]]


def index_of(metadata: Metadata, folder: Path) -> Index:
    """An index as plain values, after looking whether they can be.

    Raises:
        ValueError: it contradicts itself, or the files of the folder.
    """
    sizes: dict[str, int] = {}
    places = {(key.fqn, tuple(key.offset or ())): place for key, place in (metadata.storage_data or {}).items()}
    tensors, items = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            # Pickled objects of other programs: none of ours has any, and nothing of ours reads one.
            continue
        tensors[name] = TensorInfo(_extent(name, entry.size), entry.properties.dtype)
        items[name] = tuple(_item(name, tensors[name], part, places, folder, sizes) for part in entry.chunks)
        total = sum(item.region.numel for item in items[name])
        if total > math.prod(tensors[name].shape):
            raise ValueError(f"the parts of {name} have {total} elements, more than its shape {tensors[name].shape}")
    return Index(tensors, items)


def _item(
    name: str,
    tensor: TensorInfo,
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
    place = places.get((name, region.offset))
    if place is None:
        raise ValueError(f"the part of {name} at {region.offset} is in no file")
    file, start, num_bytes = place.relative_path, place.offset, place.length
    if not isinstance(file, str) or file != Path(file).name or file in (".", ".."):
        raise ValueError(f"{name} would be in {file!r}, which is no file of this folder")
    if place.transform_descriptors:
        raise ValueError(f"{name} was written through {place.transform_descriptors}, which nothing here undoes")
    if file not in sizes:
        sizes[file] = (folder / file).stat().st_size
    if not (0 <= start <= start + num_bytes <= sizes[file]):
        raise ValueError(f"a part of {name} would be at {start} + {num_bytes} of {file}, which has {sizes[file]} bytes")
    if region.numel * tensor.dtype.itemsize > num_bytes:
        raise ValueError(f"a part of {name} has {region.numel} elements of {tensor.dtype} in {num_bytes} bytes")
    return StoredItem(region, file, start, num_bytes)


def _extent(name: str, numbers: Any) -> tuple[int, ...]:
    """A shape or an offset that can be one."""
    extent = tuple(numbers)
    if len(extent) > _MOST_DIMENSIONS or not all(type(number) is int and number >= 0 for number in extent):
        raise ValueError(f"{name} has the shape or offset {extent[:_MOST_DIMENSIONS]}")
    if math.prod(extent) > _MOST_ELEMENTS:
        raise ValueError(f"{name} has the shape or offset {extent}, larger than any memory")
    return extent


def pickled_index(tensors: Mapping[str, TensorInfo], items: Iterable[StoredItem]) -> bytes:
    """The contents of `.metadata`, as PyTorch and Megatron read them."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for item in sorted(items, key=lambda item: (item.region.name, item.region.offset)):
        parts = chunks[item.region.name]
        key = MetadataIndex(item.region.name, item.region.offset, len(parts))
        parts.append(ChunkStorageMetadata(torch.Size(item.region.offset), torch.Size(item.region.shape)))
        places[key] = _StorageInfo(item.file, item.start, item.num_bytes)
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks[name])
        for name, tensor in tensors.items()
    }
    metadata = Metadata(entries, storage_data=places, storage_meta=StorageMeta())
    metadata.version = _PYTORCH_FORMAT
    return pickle.dumps(metadata)
