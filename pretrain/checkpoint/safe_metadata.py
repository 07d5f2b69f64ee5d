"""Refusing pickled code, and damage, in what a checkpoint holds besides tensors.

PyTorch's distributed checkpoints keep their index (`.metadata`) as a pickle, and PyTorch unpickles it without
restraint. Here it is read by an unpickler that knows the index's classes and nothing else, and that makes no object
larger than an index has: a few bytes of a pickle can otherwise ask for a copy of a copy of a copy. Tensors are read with
`weights_only`, and we store no objects: `common.pt`, Megatron's file for them, is empty.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from pretrain.checkpoint.derived import is_moment
from pretrain.checkpoint.folder import SavedState
from pretrain.checkpoint.index import INDEX_FILE, Index, index_of
from pretrain.errors import CheckpointError

# What Megatron 0.16.1 with torch 2.11 to 2.13 writes into an index: names by module.
_ALLOWED = {
    "pathlib": "PosixPath",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
}
_MOST_FIELDS = 32


def _empty(kind: type) -> Callable[[], Any]:
    return lambda: kind()


def _size(extent: Any = ()) -> torch.Size:
    if len(extent) > _MOST_FIELDS:
        raise pickle.UnpicklingError(f"it wants a tensor of {len(extent)} dimensions")
    return torch.Size(extent)


def _integer(number: Any = 0) -> int:
    if not isinstance(number, int):
        raise pickle.UnpicklingError("it wants to make a number of something else")
    return int(number)


def _encode(text: Any, encoding: Any) -> bytes:
    """Bytes in pickles of protocol 2, which are text in this one encoding."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"it wants to encode as {encoding!r}")
    return text.encode("latin1")


# What would copy anything as often as it is asked to, in the one way in which an index needs it.
_BOUNDED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _size,
    ("builtins", "int"): _integer,
    ("builtins", "slice"): slice,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _empty(OrderedDict),
    **{("builtins", kind.__name__): _empty(kind) for kind in (dict, list, set, tuple)},
}


@cache
def _with_few_fields(kind: type) -> type:
    """A class of the index whose objects are not filled from dictionaries of any size."""

    def set_state(self: Any, state: Any) -> None:
        if not isinstance(state, dict) or len(state) > _MOST_FIELDS:
            raise pickle.UnpicklingError(f"it wants a {kind.__name__} of other fields than it has")
        vars(self).update(state)

    return type(kind.__name__, (kind,), {"__setstate__": set_state})


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _BOUNDED:
            return _BOUNDED[module, name]
        is_dtype = module == "torch" and name.isidentifier() and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, "").split():
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which no checkpoint index needs")
        found = super().find_class(module, name)
        fills_itself = not dataclasses.is_dataclass(found) or "__setstate__" in vars(found)
        return found if fills_itself else _with_few_fields(found)


def read_index(folder: Path) -> Index:
    """A checkpoint's index, read without running anything it could hold and before any tensor is.

    Raises:
        CheckpointError: it is missing or damaged, refers to anything but an index's classes, contradicts itself, or
            speaks of more than the files of the folder can hold.
    """
    try:
        content = (folder / INDEX_FILE).read_bytes()
        metadata = _IndexUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        return index_of(metadata, folder)
    # Damaged bytes make an unpickler raise anything, and give its objects any fields.
    except Exception as error:
        raise CheckpointError(
            f"{folder}/{INDEX_FILE} is not a checkpoint index that can be trusted: {error}"
        ) from error


def files_with_weights(saved: SavedState) -> list[str]:
    """Names of a checkpoint's files without those in which only the optimizer's moments are.

    Raises:
        CheckpointError: see `read_index`.
    """
    files: dict[bool, set[str]] = {False: set(), True: set()}
    for name, items in read_index(saved.path).items.items():
        files[is_moment(name)].update(item.file for item in items)
    return sorted(saved.files.keys() - (files[True] - files[False]))


def check_small_files(folder: Path) -> Index:
    """Read the index, which is returned, and the two files that Megatron keeps beside it.

    Raises:
        CheckpointError: one is missing or damaged, or refers to anything but an index's classes, or plain values.
    """
    index = read_index(folder)
    for name, read in (("common.pt", _read_common), ("metadata.json", _read_format)):
        try:
            read(folder / name)
        # As above. PyTorch's text goes no further, as it advises to load without restraint.
        except Exception as error:
            raise CheckpointError(
                f"{folder}/{name} is not a file of a checkpoint that can be trusted: it is damaged, or holds more than "
                "plain values"
            ) from error
    return index


def _read_common(path: Path) -> None:
    torch.load(path, map_location="cpu", weights_only=True)


def _read_format(path: Path) -> None:
    json.loads(path.read_bytes())["sharded_backend"]
