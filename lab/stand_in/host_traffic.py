"""Watch on all that passes between the host and a stand-in for its GPU, with the lines of our code that cause it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lab.stand_in.copies import becomes_pinned, is_non_blocking
from pretrain.planning.dryrun.gpu import DEVICE, StandInGpu, is_on_device
from pretrain.planning.dryrun.lines import CallSite, calling_line
from pretrain.planning.dryrun.operations import tensors_in


class Traffic(StrEnum):
    """Kinds of traffic, in the order of a report."""

    MIXED = "mixed devices"
    """An operation of the device's tensors with others: a GPU refuses it, or a kernel reads addresses of the host."""
    HOST_TENSOR = "host tensors"
    """A tensor made of nothing, with a dimension or more, that is the host's: its device was left out, or it is meant."""
    PAGEABLE = "pageable copies"
    """A copy from or to memory that is not page-locked: the host may wait for all that the stream has to do."""
    PINNED = "pinned copies"
    """A copy from or to page-locked memory that the host does not wait for."""
    READ = "host reads"
    """The host waits for values of the device, or for a shape that follows from them."""
    WAIT = "host waits"
    """The host waits for all of a stream or of the device."""


@dataclass(frozen=True)
class LineTraffic:
    """Traffic of one kind from one line.

    Attributes:
        what: the operation.
        calls: number of calls.
        num_bytes: bytes of all calls.
    """

    kind: Traffic
    place: CallSite
    what: str
    calls: int
    num_bytes: int


class HostTraffic(TorchDispatchMode):
    """Counter of traffic by kind, line and operation.

    A mixed operation goes on with the device's copies of its arguments, so that one step finds all.
    """

    def __init__(self, gpu: StandInGpu) -> None:
        """Watch this GPU; within its stand-in."""
        super().__init__()
        self._gpu = gpu
        self._calls: Counter[tuple[Traffic, CallSite, str]] = Counter()
        self._bytes: Counter[tuple[Traffic, CallSite, str]] = Counter()

    @contextmanager
    def watching(self) -> Iterator[HostTraffic]:
        """Count until the block ends."""
        gpu = self._gpu
        with (
            patch.object(gpu, "on_wait", lambda name: self._found(Traffic.WAIT, name)),
            patch.object(gpu, "on_read", lambda tensor: self._found(Traffic.READ, "tolist", tensor.nbytes)),
            patch.object(gpu, "on_upload", lambda tensor: self._found(Traffic.PAGEABLE, _TO_DEVICE, tensor.nbytes)),
            self,
        ):
            yield self

    def findings(self) -> tuple[LineTraffic, ...]:
        """All traffic so far, by kind, the most frequent first."""
        keys = sorted(self._calls, key=lambda key: (list(Traffic).index(key[0]), -self._calls[key], key[1], key[2]))
        return tuple(LineTraffic(*key, self._calls[key], self._bytes[key]) for key in keys)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((*args, *kwargs.values()))
        name = func._schema.name.removeprefix("aten::")
        if func in _COPIES:
            self._copy(func, *_ends(func, args, kwargs), non_blocking=is_non_blocking(func, args, kwargs))
        elif func is torch.ops.aten._local_scalar_dense.default:
            if is_on_device(tensors[0]):
                self._found(Traffic.READ, "item", tensors[0].element_size())
        elif _is_mixed(func, tensors):
            self._found(Traffic.MIXED, name, sum(t.nbytes for t in tensors if not is_on_device(t)))
            args, kwargs = tree_map(_moved, (args, kwargs))
        elif any(map(is_on_device, tensors)) and _shape_is_data(func, args, kwargs):
            self._found(Traffic.READ, name)
            if func.overloadpacket is _aten.nonzero:
                # Without data: all of them.
                return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
            if func.overloadpacket in _BY_INDICES:
                args = (args[0], [index for mask in args[1] for index in _all_of(mask)], *args[2:])
        out = func(*args, **kwargs)
        if not tensors:
            for tensor in tensors_in(out):
                if not is_on_device(tensor) and tensor.dim():
                    self._found(Traffic.HOST_TENSOR, name, tensor.nbytes)
        return out

    def _copy(self, func: Any, source: Tensor, to_device: bool, target: Tensor | None, *, non_blocking: bool) -> None:
        if is_on_device(source) == to_device:
            return
        host = target if is_on_device(source) else source
        pinned = host is not None and self._gpu.is_pinned(host)
        pinned |= becomes_pinned(func, non_blocking=non_blocking, to_host=not to_device)
        kind = Traffic.PAGEABLE if not pinned else Traffic.PINNED if non_blocking else Traffic.WAIT
        self._found(kind, _TO_DEVICE if to_device else _TO_HOST, source.nbytes)

    def _found(self, kind: Traffic, what: str, num_bytes: int = 0) -> None:
        key = kind, calling_line(), what
        self._calls[key] += 1
        self._bytes[key] += num_bytes


_TO_DEVICE, _TO_HOST = "copy to the device", "copy to the host"
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_BY_INDICES = (_aten.index, _aten.index_put, _aten.index_put_)
_SHAPES = {
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
    _aten.repeat_interleave,
}


def _ends(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, bool, Tensor | None]:
    """A copy's source, whether its end is on the device, and its end if there is one before."""
    if func is _aten.copy_.default:
        return args[1], is_on_device(args[0]), args[0]
    device = kwargs.get("device")
    return args[0], is_on_device(args[0]) if device is None else torch.device(device).type == DEVICE.type, None


def _is_mixed(func: Any, tensors: list[Tensor]) -> bool:
    """True if an operation of the device's gets a tensor of the host's. A number of the host's is an argument of a kernel,
    but NCCL and Triton take none.
    """
    for_gpus = func.namespace == "c10d" or "triton" in func._schema.name
    if for_gpus:
        return not all(map(is_on_device, tensors))
    return any(map(is_on_device, tensors)) and any(t.dim() and not is_on_device(t) for t in tensors)


def _shape_is_data(func: Any, args: Any, kwargs: Any) -> bool:
    """True if the shape of the result, or of an intermediate one, follows from values."""
    packet = func.overloadpacket
    if packet is _aten.repeat_interleave:
        # Some callers know the number of results.
        return kwargs.get("output_size") is None
    if packet in _BY_INDICES:
        by_mask = any(_is_mask(index) for index in args[1])
        # One number for all that is selected is filled in.
        return by_mask and (packet is _aten.index or args[2].numel() != 1)
    return packet in _SHAPES


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _all_of(index: Any) -> list[Any]:
    """Indices of all that a mask may select; anything else as it is."""
    if not _is_mask(index):
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]


def _moved(arg: Any) -> Any:
    on_host = isinstance(arg, Tensor) and not is_on_device(arg)
    return torch.empty_like(arg, device=DEVICE) if on_host else arg
