"""Writing a file that `torch.load` reads, with no more memory than a region of one tensor."""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from pretrain.checkpoint.store.lazy_tensor import memory_of
from pretrain.checkpoint.store.tensors import Region, TensorInfo, pieces
from pretrain.checkpoint.store.torch_pickle import STORAGES
from pretrain.errors import CheckpointError

# Where torch's own writer puts elements, so that a mapped file can be computed with.
_ALIGNMENT = 64
_PREFIX = "archive"
# A local header of fixed length, and what Python adds for sizes of 64 bits.
_HEADER_BYTES, _ZIP64_BYTES = 30, 20


@dataclass(frozen=True)
class TensorPlaceholder:
    """Placeholder in an object for a tensor whose elements are read when they are written.

    Attributes:
        name: name in the regions that are asked for.
        info: its shape and dtype.
    """

    name: str
    info: TensorInfo


@dataclass(frozen=True)
class _Storage:
    key: str
    info: TensorInfo


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[TensorPlaceholder] = []
        self._kinds = {dtype: getattr(torch, name, None) for name, dtype in STORAGES.items() if name[0] != "U"}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return "storage", self._kinds[obj.info.dtype], obj.key, "cpu", math.prod(obj.info.shape)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TensorPlaceholder):
            return NotImplemented
        shape = obj.info.shape
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        self.tensors.append(obj)
        storage = _Storage(str(len(self.tensors) - 1), obj.info)
        return _rebuild_tensor_v2, (storage, 0, shape, strides, False, OrderedDict())


def write_zip(path: Path, tree: Any, read: Callable[[Region], Tensor], max_elements: int = 1 << 24) -> None:
    """Write an object as `torch.save` does.

    Args:
        path: the file, which must not exist. It is synced to disk.
        tree: the object, with a `TensorPlaceholder` in place of each tensor.
        read: gives a region of one of them, of its dtype.
        max_elements: asked for at a time.

    Raises:
        CheckpointError: the file cannot be written.
    """
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(tree)
    try:
        with path.open("xb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                for name, value in (("data.pkl", content.getvalue()), ("byteorder", b"little")):
                    with _entry(archive, file, name, len(value)) as entry:
                        entry.write(value)
                for key, stored in enumerate(pickler.tensors):
                    with _entry(archive, file, f"data/{key}", stored.info.num_bytes) as entry:
                        for piece in pieces(stored.info.whole(stored.name), max_elements) if _any(stored) else ():
                            part = read(piece)
                            if part.dtype != stored.info.dtype or part.numel() != piece.numel:
                                raise AssertionError(f"{piece} was read as {part.dtype} of shape {tuple(part.shape)}")
                            entry.write(memory_of(part.contiguous()))
                with _entry(archive, file, "version", 2) as entry:
                    entry.write(b"3\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


def _any(stored: TensorPlaceholder) -> bool:
    return stored.info.num_bytes > 0


def _entry(archive: zipfile.ZipFile, file: BinaryIO, name: str, size: int) -> Any:
    """An entry to write to, its content aligned."""
    info = zipfile.ZipInfo(f"{_PREFIX}/{name}", (1980, 1, 1, 0, 0, 0))
    info.file_size = size
    large = size * 1.05 > zipfile.ZIP64_LIMIT
    start = file.tell() + _HEADER_BYTES + len(info.filename) + (_ZIP64_BYTES if large else 0)
    # An extra field has four bytes besides its content.
    padding = -(start + 4) % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(info, "w", force_zip64=large)
