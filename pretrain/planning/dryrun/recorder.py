"""Recorder of what a rank allocates and sends while it runs on fake tensors: every storage and every collective, seen
below autograd.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pretrain.planning.dryrun.parts import MemoryPart, part_of_caller


@dataclass(frozen=True)
class Collective:
    """One call of torch.distributed.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv or barrier.
        axis: the group's name.
        ranks: of the group, or this rank's peer for a message.
        num_bytes: of what this rank hands over: its part for an all_gather, all parts for the others.
        part: of the run that called.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    num_bytes: int
    part: MemoryPart

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to others, if the library sends no more than it must (a ring, for sums)."""
        size, num_bytes = len(self.ranks), self.num_bytes
        match self.op:
            case "all_gather":
                return num_bytes * (size - 1)
            case "all_to_all" | "reduce_scatter":
                return num_bytes * (size - 1) // size
            case "all_reduce":
                return 2 * num_bytes * (size - 1) // size
            case "broadcast" | "recv" | "barrier":
                return 0
        return num_bytes


@dataclass(frozen=True)
class Snapshot:
    """Bytes at one moment.

    Attributes:
        by_part: on the device.
        host: in host memory: of tables that are stepped there.
    """

    by_part: dict[MemoryPart, int]
    host: int = 0

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
        collectives: in the order of the calls.
        num_host_reads: values that the host read.
        num_kernels: operations that write something: about as many kernels as a device would be asked for.
        peak: since `restart_peak`.
    """

    def __init__(self, axes: Mapping[str, str], *, answers: bool = True, experts_per_token: int = 0) -> None:
        """Start with nothing seen.

        Args:
            axes: a name for readers by PyTorch's name of a group.
            answers: whether tensors have no data.
            experts_per_token: what a mixture's map, [experts, tokens], selects of each column.
        """
        super().__init__()
        self._experts_per_token = experts_per_token
        self._axes, self._answers = axes, answers
        self.collectives: list[Collective] = []
        self.num_host_reads = 0
        self.num_kernels = 0
        self._live: dict[int, _Live] = {}
        self._bytes: Counter[MemoryPart] = Counter()
        self._total = 0
        self.peak = Snapshot({})
        self._peak_total = 0

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
        for tensor in tree_iter(out):
            # Backward of a gather returns an empty sparse tensor, which has no storage of its own.
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                writes |= self._see(tensor)
        # Room alone is no kernel.
        self.num_kernels += writes and func.overloadpacket not in _ROOM
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
            return out

        with patch.object(torch.UntypedStorage, "resize_", resize), self:
            yield self

    def now(self) -> Snapshot:
        """Bytes held at this moment."""
        on_device: dict[MemoryPart, int] = {
            part: num for part, num in self._bytes.items() if num and part != MemoryPart.HOST
        }
        return Snapshot(on_device, self._bytes[MemoryPart.HOST])

    def restart_peak(self) -> None:
        """Forget the largest moment so far."""
        self._peak_total, self.peak = self._total, self.now()

    def assign(self, tensors: Iterable[Tensor], part: MemoryPart) -> None:
        """Say which part the storages of these tensors belong to, whoever allocated them."""
        for tensor in tensors:
            live = self._live.get(tensor.untyped_storage()._cdata)
            if live is not None and live.part != part:
                self._bytes[live.part] -= live.num_bytes
                self._bytes[part] += live.num_bytes
                live.part = part

    def _new(self, tensor: Tensor) -> Tensor:
        self.num_kernels += self._see(tensor)
        return tensor

    def _see(self, tensor: Tensor) -> bool:
        """Record a tensor's storage; True if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return False
        live = _Live(part_of_caller(), storage.nbytes())
        self._live[key] = live
        self._add(live.part, live.num_bytes)
        weakref.finalize(storage, self._free, key)
        return True

    def _free(self, key: int) -> None:
        live = self._live.pop(key)
        self._add(live.part, -live.num_bytes)

    def _add(self, part: MemoryPart, num_bytes: int) -> None:
        self._bytes[part] += num_bytes
        self._total += 0 if part == MemoryPart.HOST else num_bytes
        if self._total > self._peak_total:
            self._peak_total, self.peak = self._total, self.now()

    def _answer(self, func: Any, args: Any) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        op, sent = _OPS[name]
        groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg)]
        group = ProcessGroup.unbox(groups[0])
        ranks = tuple(dist.get_process_group_ranks(group))
        if op in ("send", "recv"):
            ranks = (ranks[args[2]],)
        num_bytes = sum(t.numel() * t.element_size() for t in tree_iter(args[sent]) if isinstance(t, Tensor))
        axis = self._axes.get(group.group_name, "other")
        self.collectives.append(Collective(op, axis, ranks, num_bytes, part_of_caller()))
        work = FakeWork().boxed()
        # All results of the schema but the last are tensors that were handed in to be written.
        return work if len(func._schema.returns) == 1 else (args[0], work)


_ROOM = {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}


def _is_group(arg: torch.ScriptObject) -> bool:
    return str(arg._type()).endswith("ProcessGroup")


# Readers' name of each of PyTorch's operators, and the argument that this rank hands over.
_OPS = {
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "allreduce_coalesced_": ("all_reduce", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "barrier": ("barrier", 0),
}
