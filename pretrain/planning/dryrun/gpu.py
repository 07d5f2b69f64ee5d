"""A stand-in for a GPU on machines without one: tensors on "meta" are the device's, tensors on "cpu" the host's.

Under `parallel.machine.cpu.cuda_on_cpu` host and device are one, and a run takes the CPU's branches. Here they are two: what
asks for CUDA gets "meta", tensors there say that they are CUDA's, and page-locked memory is told from other memory. So
a dry run takes a GPU's branches, and sees what lies on the wrong side. Autograd and c10d work on "meta"; on fake tensors
of "cuda" the backward pass asks for the device's context, and ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pretrain.planning.dryrun import gpu_ops
from pretrain.planning.dryrun.streams import Streams

DEVICE = torch.device("meta")
"""The GPU."""
CAPABILITY = (9, 0)
"""Its compute capability."""
MULTIPROCESSORS = 132
"""Number of its multiprocessors."""

_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
_OF_VALUES = ("tensor", "new_tensor")
_METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_get_backend = dist.ProcessGroup._get_backend
_type = torch.Tensor.type
_TYPES = {
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.DoubleTensor",
}


def is_on_device(tensor: Tensor) -> bool:
    """True of the GPU's tensors."""
    # To ask a fake tensor for `device` is an operation, which every mode sees.
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return bool(device.type == DEVICE.type)


class StandInGpu:
    """Answers to what a process asks of CUDA, for one device.

    Attributes:
        streams: streams of the device, which keep the order of what they are asked for.
        on_wait: called with the name of each call by which the host waits for the device.
        on_read: called with each tensor of the device whose values the host asks for as a list.
        on_upload: called with each tensor of the device that is made of the host's values.
        on_announced: called with each tensor of which `record_stream` says that a stream uses it, and the stream's name.
    """

    def __init__(self) -> None:
        self.on_wait: Callable[[str], None] = lambda name: None
        self.on_read: Callable[[Tensor], None] = lambda tensor: None
        self.on_upload: Callable[[Tensor], None] = lambda tensor: None
        self.on_announced: Callable[[Tensor, str], None] = lambda tensor, stream: None
        self.streams = Streams(lambda name: self.on_wait(name))
        # Storages by address: fake ones have no memory that could be page-locked.
        self._pinned: set[int] = set()

    def is_pinned(self, tensor: Tensor) -> bool:
        """True of host tensors in page-locked memory."""
        return tensor.untyped_storage()._cdata in self._pinned

    def redirections(self) -> dict[str, Any]:
        """Replacements by name, as of `parallel.machine.cpu.REDIRECTIONS`, over which they are put."""
        return {
            "torch.cuda.current_device": lambda: DEVICE,
            "torch.cuda.device": lambda *_: nullcontext(),
            "torch.cuda.get_device_capability": lambda *_: CAPABILITY,
            "torch.cuda.get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=MULTIPROCESSORS),
            "torch.cuda.synchronize": lambda *_: self._wait(),
            "torch.Tensor.is_cuda": property(is_on_device),
            "torch.Tensor.cuda": _to_device,
            "torch.Tensor.type": _type_of,
            "torch.Tensor.pin_memory": lambda tensor, *_: self._pin(tensor.clone()),
            "torch.Tensor.is_pinned": lambda tensor, *_: self.is_pinned(tensor),
            "torch.Tensor.record_stream": lambda tensor, stream: self.on_announced(tensor, stream.name),
            # Of all elements in one copy; fake tensors would be asked for one after the other.
            "torch._subclasses.fake_tensor.FakeTensor.tolist": lambda tensor: self._values(tensor),
            **{f"torch.{name}": self._made(getattr(torch, name)) for name in _FACTORIES},
            **{f"torch.Tensor.{name}": self._made(getattr(torch.Tensor, name)) for name in _METHODS},
            # There is one for the CPU's tensors alone.
            "torch.distributed.ProcessGroup._get_backend": lambda group, _: _get_backend(group, torch.device("cpu")),
            **self.streams.redirections(),
            **gpu_ops.REDIRECTIONS,
        }

    def _wait(self) -> None:
        self.streams.synchronize()
        self.on_wait("torch.cuda.synchronize")

    def _made(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function that makes tensors, for which "cuda" is the device, and `pin_memory` a mark."""

        @wraps(function)
        def make(*args: Any, **kwargs: Any) -> Tensor:
            pin = kwargs.pop("pin_memory", False)
            kwargs = {name: DEVICE if _is_cuda(value) else value for name, value in kwargs.items()}
            made = function(*(DEVICE if _is_cuda(value) else value for value in args), **kwargs)
            # PyTorch copies them without an operation of its own.
            if function.__name__ in _OF_VALUES and is_on_device(made):
                self.on_upload(made)
            return self._pin(made) if pin else made

        return make

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned.add(storage._cdata)
        weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return tensor

    def _values(self, tensor: Tensor) -> Any:
        if is_on_device(tensor):
            self.on_read(tensor)
        return _nested(1.0 if tensor.is_floating_point() else 1, tuple(tensor.shape))


def _to_device(tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
    return tensor.to(DEVICE, non_blocking=non_blocking)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


def _type_of(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not args and not kwargs and is_on_device(tensor) and tensor.dtype in _TYPES:
        return _TYPES[tensor.dtype]
    return _type(tensor, *args, **kwargs)


def _nested(value: float, shape: tuple[int, ...]) -> Any:
    return value if not shape else [_nested(value, shape[1:]) for _ in range(shape[0])]
