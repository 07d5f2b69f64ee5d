"""Writing a checkpoint's index as PyTorch and Megatron read it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
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

from pretrain.checkpoint.index import StoredItem
from pretrain.checkpoint.store.tensors import TensorInfo

# Version of PyTorch's checkpoint format. Not all versions of PyTorch that we run with have a name for it.
_PYTORCH_FORMAT = "1.0.0"


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
