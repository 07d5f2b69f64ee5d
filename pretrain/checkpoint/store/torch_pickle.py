"""The pickle inside of a file that `torch.save` wrote, read without running anything that it names.

Tensors and plain values come back as what they are, and so do a program's arguments (`Settings`). An object of any other
class becomes an `Inert`, which knows the class's name alone: nothing of it is imported or called, and what the pickle
would have given it is dropped.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from reprlib import repr as short
from types import MappingProxyType
from typing import Any

import torch

from pretrain.checkpoint.pickle_budget import check_budget
from pretrain.checkpoint.store.lazy_tensor import LazyTensor

# By the name of the class of storages that a pickle refers to.
STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,
}
_MAX_DIMENSIONS = 64


class Inert:
    """An object of a class that is not loaded.

    Attributes:
        module: module that defines its class, or the function that makes it.
        name: name of that class or function.
    """

    module: str
    name: str

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    # Called by pickles of classes that derive from list and dict.
    def append(self, item: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}, not loaded>"


class Settings:
    """An `argparse.Namespace`, as values by name."""

    values: Mapping[str, Any] = MappingProxyType({})

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError("it wants a namespace of other things than values by name")
        self.values = state


class LazyUnpickler(pickle.Unpickler):
    """Reads a pickle of `torch.save`.

    Args:
        content: the pickle.
        stored: given a storage's key, its dtype and its number of elements, makes the tensor of this shape, strides and
            first element.
    """

    def __init__(self, content: bytes, stored: Callable[..., LazyTensor]) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._stored = stored
        self._classes: dict[tuple[str, str], type[Inert]] = {}
        self._known: dict[tuple[str, str], Any] = {
            ("argparse", "Namespace"): Settings,
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): torch.Size,
            ("builtins", "set"): set,
            ("_codecs", "encode"): _encode,
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._typed_tensor,
            ("torch._utils", "_rebuild_parameter"): _first,
            ("torch._utils", "_rebuild_parameter_with_state"): _first,
            ("torch._tensor", "_rebuild_from_type_v2"): _of_subclass,
        }

    def find_class(self, module: str, name: str) -> Any:
        if module == "__builtin__":
            # As protocol 2 spells it.
            module = "builtins"
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in self._classes:
            self._classes[module, name] = type("Inert", (Inert,), {"module": module, "name": name})
        return self._classes[module, name]

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("storage", kind, str(key), str(), int(numel)):
                name = getattr(kind, "name", None)
                if isinstance(name, str) and name in STORAGES and kind.module in ("torch", "torch.storage"):
                    return key, STORAGES[name], numel
        raise pickle.UnpicklingError(f"{short(pid)} is not a reference to stored elements")

    def _tensor(self, storage: Any, first: Any, shape: Any, strides: Any, *_: Any) -> LazyTensor:
        key, dtype, numel = storage
        return self._typed_tensor((key, dtype, numel), first, shape, strides, False, None, dtype)

    def _typed_tensor(
        self, storage: Any, first: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any, *_: Any
    ) -> LazyTensor:
        """A tensor with a dtype of its own: its storage then counts bytes."""
        key, stored, numel = storage
        numbers = (first, *shape, *strides)
        plain = all(type(number) is int for number in numbers)
        if not plain or not isinstance(dtype, torch.dtype) or len(shape) > _MAX_DIMENSIONS:
            raise pickle.UnpicklingError(f"{short(numbers)} is not the geometry of a tensor")
        return self._stored(key, numel * stored.itemsize, dtype, first, tuple(shape), tuple(strides))


def load(content: bytes, stored: Callable[..., LazyTensor]) -> Any:
    """The object that a pickle of `torch.save` holds.

    Args:
        content: the pickle.
        stored: makes a tensor of a storage (`LazyUnpickler`).

    Raises:
        pickle.UnpicklingError: the pickle is damaged, or made to exhaust memory. Damaged bytes may raise anything else,
            too.
    """
    check_budget(content)
    return LazyUnpickler(content, stored).load()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Decode bytes as pickle protocol 2 spells them."""
    if encoding not in ("latin1", "latin-1") or not isinstance(text, str):
        raise pickle.UnpicklingError(f"it encodes to {short(encoding)}")
    return text.encode("latin1")


def _first(data: Any, *_: Any) -> Any:
    """A parameter's data."""
    return data


def _of_subclass(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """The tensor that a subclass of tensors wraps."""
    return make(*arguments)
