"""Recorder of what a rank allocates and sends while it runs on fake tensors: every storage and every collective, seen
below autograd.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.planning.dryrun.collectives import CallReader, Collective
from pretrain.planning.dryrun.gpu import StandInGpu, is_on_device
from pretrain.planning.dryrun.operations import ROOM, tensors_in
from pretrain.planning.dryrun.parts import MemoryPart, part_of_caller
from pretrain.planning.dryrun.pools import StreamPools

_ELSEWHERE = (MemoryPart.HOST, MemoryPart.FILES)


@dataclass(frozen=True)
class Snapshot:
    """Bytes at one moment.

    Attributes:
        by_part: bytes on the device.
        host: bytes in host memory: of tables that are stepped there.
        files: bytes of tables that lie in files.
    """

    by_part: dict[MemoryPart, int]
    host: int = 0
    files: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_part.values())


class _Live:
    """A storage that exists: its part, and its size when it was last looked at."""

    __slots__ = ("num_bytes", "part")

    def __init__(self, part: MemoryPart, num_bytes: int) -> None:
        self.part, self.num_bytes = part, num_bytes


class Recorder(TorchDispatchMode):
    """Counter of live bytes by part, which remembers them at the peak.

    For tensors without data it also answers collectives, without a library, and the host's reads, with ones. It watches
    real tensors as well, whose collectives and reads it leaves alone.

    Attributes:
        collectives: calls of torch.distributed, in order.
        num_host_reads: values that the host read.
        num_kernels: operations that write something: about as many kernels as a device would be asked for.
        peak: bytes at the largest moment since `restart_peak`; on a GPU with what its streams keep from each other.
    """

    def __init__(
        self,
        axes: Mapping[str, str],
        *,
        answers: bool = True,
        experts_per_token: int = 0,
        gpu: StandInGpu | None = None,
    ) -> None:
        """Start with nothing seen.

        Args:
            axes: a name for readers by PyTorch's name of a group.
            answers: True if tensors have no data.
            experts_per_token: experts that a mixture's map, [experts, tokens], selects in each column.
            gpu: the rank's, on whose streams memory is allocated; None: host and device are one.
        """
        super().__init__()
        self._gpu, self._pools = gpu, StreamPools()
        self._experts_per_token = experts_per_token
        self._answers, self._calls = answers, CallReader(axes)
        self.collectives: list[Collective] = []
        self.num_host_reads = 0
        self.num_kernels = 0
        self._live: dict[int, _Live] = {}
        self._bytes: Counter[MemoryPart] = Counter()
        self._total = 0
        self._peak, self._peak_total = Snapshot({}), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._answers and func is torch.ops.aten._local_scalar_dense.default:
            self.num_host_reads += 1
            return 1.0 if args[0].dtype.is_floating_point else 1
        if self._answers and func.namespace == "c10d":
            return self._answer(func, args)
        if self._answers and func is torch.ops.aten.masked_select.default:
            # The number of them is data; only a mixture's map selects anything.
            return self._new(args[0].new_empty(args[1].shape[1] * self._experts_per_token))
        out = func(*args, **(kwargs or {}))
        writes = func._schema.is_mutable
        for tensor in tensors_in(out):
            # Backward of a gather returns an empty sparse tensor, which has no storage of its own.
            if tensor.layout == torch.strided:
                writes |= self._see(tensor, (*args, *(kwargs or {}).values()))
        # Room alone is no kernel.
        if writes and func.overloadpacket not in ROOM:
            self.count_kernel()
        return out

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record until the block ends."""
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, num_bytes: int) -> Any:
            out = original(storage, num_bytes)
            if (live := self._live.get(storage._cdata)) is not None:
                self._add(live.part, num_bytes - live.num_bytes)
                live.num_bytes = num_bytes
                if self._gpu is not None:
                    self._pools.free(storage._cdata)
                    self._pools.allocate(storage._cdata, num_bytes, self._gpu.streams.launching(()).name)
            return out

        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize))
            if self._gpu is not None:
                stack.enter_context(patch.object(self._gpu, "on_announced", self._announce))
                stack.enter_context(patch.object(self._gpu.streams, "on_handed_over", self._announce))
            stack.enter_context(self._calls.reading_batches())
            stack.enter_context(self)
            yield self

    def now(self) -> Snapshot:
        """Bytes held at this moment."""
        on_device: dict[MemoryPart, int] = {
            part: num for part, num in self._bytes.items() if num and part not in _ELSEWHERE
        }
        return Snapshot(on_device, self._bytes[MemoryPart.HOST], self._bytes[MemoryPart.FILES])

    @property
    def peak(self) -> Snapshot:
        """See the class."""
        if self._gpu is None:
            return self._peak
        kept = {MemoryPart.STREAMS: self._pools.num_bytes - self._peak_total}
        return Snapshot({**self._peak.by_part, **kept}, self._peak.host, self._peak.files)

    def restart_peak(self) -> None:
        """Forget the largest moment so far."""
        self._peak_total, self._peak = self._total, self.now()
        self._pools.restart()

    def count_kernel(self) -> None:
        """Count a kernel: of an operation that was seen, or one that was launched."""
        self.num_kernels += 1
        self._pools.launch()

    def assign(self, tensors: Iterable[Tensor], part: MemoryPart) -> None:
        """Say which part the storages of these tensors belong to, whoever allocated them."""
        for tensor in tensors:
            live = self._live.get(tensor.untyped_storage()._cdata)
            if live is not None and live.part != part:
                self._bytes[live.part] -= live.num_bytes
                self._bytes[part] += live.num_bytes
                live.part = part

    def _new(self, tensor: Tensor) -> Tensor:
        if self._see(tensor, ()):
            self.count_kernel()
        return tensor

    def _see(self, tensor: Tensor, of: Any) -> bool:
        """Record the storage of a tensor that an operation of these arguments returned; True if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return False
        live = _Live(part_of_caller(), storage.nbytes())
        if self._gpu is not None and is_on_device(tensor):
            self._pools.allocate(key, live.num_bytes, self._gpu.streams.launching(tensors_in(of)).name)
        elif self._gpu is not None and live.part not in _ELSEWHERE:
            # The host's, which has room.
            live.num_bytes = 0
        self._live[key] = live
        self._add(live.part, live.num_bytes)
        weakref.finalize(storage, self._free, key)
        return True

    def _free(self, key: int) -> None:
        live = self._live.pop(key)
        self._add(live.part, -live.num_bytes)
        self._pools.free(key)

    def _announce(self, tensor: Tensor, stream: str) -> None:
        if tensor.layout == torch.strided:
            self._pools.announce(tensor.untyped_storage()._cdata, stream)

    def _add(self, part: MemoryPart, num_bytes: int) -> None:
        self._bytes[part] += num_bytes
        self._total += 0 if part in _ELSEWHERE else num_bytes
        if self._total > self._peak_total:
            self._peak_total, self._peak = self._total, self.now()

    def _answer(self, func: Any, args: Any) -> Any:
        self.collectives.append(self._calls.read(func, args))
        work = FakeWork().boxed()
        # All results of the schema but the last are tensors that were handed in to be written.
        return work if len(func._schema.returns) == 1 else (args[0], work)
