"""Refusing pickled code, and damage, in what a checkpoint holds besides tensors.

PyTorch's distributed checkpoints keep their index (`.metadata`) as a pickle, and PyTorch unpickles it without
restraint. Before it does, the file is read here by an unpickler that knows the index's classes and nothing else.
Tensors are read with `weights_only` by PyTorch itself, and we store no objects: `common.pt`, Megatron's file for them,
holds the version of its format.
"""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from pretrain.errors import CheckpointError

# What Megatron 0.16.1 with torch 2.11 to 2.13 writes into an index: names by module.
_ALLOWED = {
    "_codecs": "encode",
    "builtins": "dict int list set slice tuple",
    "collections": "OrderedDict",
    "pathlib": "PosixPath",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and name.isidentifier() and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no checkpoint index needs")


def check_index(folder: Path) -> None:
    """Read a checkpoint's index without running anything it could hold.

    Raises:
        CheckpointError: it is missing or damaged, or refers to anything but an index's classes.
    """
    try:
        content = (folder / ".metadata").read_bytes()
        index = _IndexUnpickler(io.BytesIO(content)).load()
        if not isinstance(index, Metadata):
            raise TypeError(f"it holds a {type(index).__name__}")
    # Damaged bytes make an unpickler raise anything.
    except Exception as error:
        raise CheckpointError(f"{folder}/.metadata is not a checkpoint index that can be trusted: {error}") from error


def check_small_files(folder: Path) -> None:
    """Read the index and the two files that Megatron keeps beside it.

    Raises:
        CheckpointError: one is missing or damaged, or refers to anything but an index's classes, or plain values.
    """
    check_index(folder)
    for name, read in (("common.pt", _read_common), ("metadata.json", _read_format)):
        try:
            read(folder / name)
        # As above. PyTorch's text goes no further, as it advises to load without restraint.
        except Exception as error:
            raise CheckpointError(
                f"{folder}/{name} is not a file of a checkpoint that can be trusted: it is damaged, or holds more than "
                "plain values"
            ) from error


def _read_common(path: Path) -> None:
    torch.load(path, map_location="cpu", weights_only=True)


def _read_format(path: Path) -> None:
    json.loads(path.read_bytes())["sharded_backend"]
