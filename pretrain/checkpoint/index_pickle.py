"""Reading the pickle that PyTorch's distributed checkpoints have for an index, without PyTorch and without trust.

PyTorch unpickles it without restraint. The unpickler here knows the names of the index's classes and nothing else,
makes plain records of them, and makes no object larger than an index has: a few bytes of a pickle can otherwise ask for
a copy of a copy of a copy. It imports nothing, not even PyTorch.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from reprlib import repr as short
from typing import Any

from pretrain.checkpoint.pickle_budget import check_budget

DTYPE_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element, by PyTorch's name of its dtype."""

_MOST_FIELDS = 32


class IndexObject:
    """An object of the index: the fields of its class, without the behaviour."""

    # Left out of the pickle where they are None.
    transform_descriptors: Any = None
    offset: Any = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict) or len(state) > _MOST_FIELDS:
            raise pickle.UnpicklingError(f"it wants a {type(self).__name__} of other fields than it has")
        vars(self).update(state)


class IndexRecord(IndexObject):
    """PyTorch's `Metadata`."""


class TensorRecord(IndexObject):
    """PyTorch's `TensorStorageMetadata`."""

    properties: Any
    size: Any
    chunks: Any


class PropertiesRecord(IndexObject):
    """PyTorch's `TensorProperties`, of which the dtype's name is kept."""

    def __setstate__(self, state: Any) -> None:
        dtype, *_ = state
        if dtype not in DTYPE_BYTES:
            raise pickle.UnpicklingError(f"it wants elements of {short(dtype)}")
        self.dtype = dtype


def _size(extent: Any = ()) -> tuple[Any, ...]:
    if len(extent) > _MOST_FIELDS:
        raise pickle.UnpicklingError(f"it wants a tensor of {len(extent)} dimensions")
    return tuple(extent)


def _integer(number: Any = 0) -> int:
    if not isinstance(number, int):
        raise pickle.UnpicklingError("it wants to make a number of something else")
    return int(number)


def _encode(text: Any, encoding: Any) -> bytes:
    """Bytes in pickles of protocol 2, which are text in this one encoding."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"it wants to encode as {short(encoding)}")
    return text.encode("latin1")


def _unread(*values: Any) -> None:
    """A path, a layout, an encoding: nothing of ours reads it."""
    if len(values) > _MOST_FIELDS:
        raise pickle.UnpicklingError("it wants a path of more parts than there are")


def _empty(kind: type) -> Callable[[], Any]:
    return lambda: kind()


_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"
# Classes that Megatron 0.16.1 with torch 2.11 to 2.13 writes into an index.
_KNOWN: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): IndexRecord,
    (_METADATA, "TensorStorageMetadata"): TensorRecord,
    (_METADATA, "TensorProperties"): PropertiesRecord,
    **{
        (_METADATA, name): IndexObject
        for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")
    },
    **{(_FILESYSTEM, name): IndexObject for name in ("_StorageInfo", "_StoragePrefix")},
    **{(_PLANNER, name): IndexObject for name in ("SavePlan", "TensorWriteData", "WriteItem")},
    (_METADATA, "_MEM_FORMAT_ENCODING"): _unread,
    (_PLANNER, "WriteItemType"): _unread,
    # Python 3.13 moved it.
    **{(module, "PosixPath"): _unread for module in ("pathlib", "pathlib._local")},
    ("torch.serialization", "_get_layout"): _unread,
    # These would copy anything as often as asked: each is allowed in the one way that an index needs.
    ("torch", "Size"): _size,
    ("builtins", "int"): _integer,
    ("builtins", "slice"): slice,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _empty(OrderedDict),
    **{("builtins", kind.__name__): _empty(kind) for kind in (dict, list, set, tuple)},
    **{("torch", name): name for name in DTYPE_BYTES},
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which no checkpoint index needs")
        return _KNOWN[module, name]


def unpickled_index(content: bytes) -> IndexRecord:
    """The object that a pickled index holds.

    Raises:
        Exception: damaged bytes make an unpickler raise anything, and give its records any fields.
    """
    check_budget(content)
    found = _IndexUnpickler(io.BytesIO(content)).load()
    if not isinstance(found, IndexRecord):
        raise TypeError(f"it holds a {type(found).__name__}")
    return found
