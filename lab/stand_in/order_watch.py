"""Watch on the order of all that a stand-in for a GPU is asked for: which operation touches which bytes on which stream.

What an operation reads and writes is what its schema says; of a tensor, all bytes from its first element to its last.
Collectives run as ProcessGroupNCCL runs them (2.11 to 2.13): on the caller's stream, or, if they are asynchronous, on a
stream of their communicator's, which waits for the caller's at the call; `wait` has the stream that calls it wait for
them. Until then they hold their tensors. Messages that are sent alone have a stream per peer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode

from lab.stand_in.accesses import accesses, has_bytes, storage_of
from lab.stand_in.copies import becomes_pinned, is_non_blocking
from lab.stand_in.lines import Lines
from lab.stand_in.order import Allocation, Race, StreamOrder
from pretrain.planning.dryrun.gpu import StandInGpu, is_on_device
from pretrain.planning.dryrun.lines import CallSite
from pretrain.planning.dryrun.operations import ROOM, tensors_in
from pretrain.planning.dryrun.streams import HOST, Clock

_aten = torch.ops.aten
_Part = tuple[Allocation, int, int]


class OrderWatch(TorchDispatchMode):
    """Tells streams' order what each operation reads and writes."""

    def __init__(self, gpu: StandInGpu) -> None:
        """Watch this GPU; within its stand-in."""
        super().__init__()
        self._gpu, self._streams, self._order = gpu, gpu.streams, StreamOrder()
        self._blocks: dict[int, Allocation] = {}
        # Those that nobody has waited for.
        self._works: set[_Work] = set()
        self._is_batch = False
        self._lines = Lines()

    @property
    def races(self) -> tuple[Race, ...]:
        """Races so far, each pair of lines once."""
        return tuple(self._order.races)

    @contextmanager
    def watching(self) -> Iterator[OrderWatch]:
        """Watch until the block ends."""
        gpu, streams = self._gpu, self._streams
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", self._resize()))
            stack.enter_context(patch("torch.distributed.batch_isend_irecv", self._batching(dist.batch_isend_irecv)))
            stack.enter_context(patch.object(streams, "order", self._order))
            stack.enter_context(patch.object(gpu, "on_announced", self._then(gpu.on_announced, self._announce)))
            stack.enter_context(patch.object(gpu, "on_read", self._then(gpu.on_read, self._host_waits)))
            stack.enter_context(
                patch.object(streams, "on_handed_over", self._then(streams.on_handed_over, self._announce))
            )
            stack.enter_context(self)
            yield self
        self._works.clear()
        self._blocks.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        tensors = list(filter(has_bytes, tensors_in((*args, *kwargs.values()))))
        stream = self._streams.launching(tensors)
        if func is _aten._local_scalar_dense.default and is_on_device(args[0]):
            self._host_waits()
        out = func(*args, **kwargs)
        results = list(filter(has_bytes, tensors_in(out)))
        on_device = [is_on_device(tensor) for tensor in (*tensors, *results)]
        if not any(on_device):
            self._by_host(func, args, kwargs, results)
            return out
        line = self._lines.line()
        for result in results:
            self._block(result, stream.name, line)
        reads, writes = accesses(func, args, kwargs, out)
        name = func._schema.name.removeprefix("aten::")
        if not all(on_device) and func in (_aten._to_copy.default, _aten.copy_.default):
            self._copy(func, args, kwargs, reads, writes, stream.name, line)
        elif func.overloadpacket not in ROOM:
            self._launch(stream.name, name, line, filter(is_on_device, reads), filter(is_on_device, writes))
        return out

    def _launch(self, actor: str, what: str, line: CallSite, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        self._order.launch(
            actor, what, line, reads=[self._part(one) for one in reads], writes=[self._part(one) for one in writes]
        )

    def _by_host(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """An operation of the host's; only memory that streams have touched has an order to keep."""
        reads, writes = accesses(func, args, kwargs, results)
        known = [[one for one in touched if storage_of(one) in self._blocks] for touched in (reads, writes)]
        if any(known) and func.overloadpacket not in ROOM:
            self._launch(HOST, func._schema.name.removeprefix("aten::"), self._lines.line(), *known)

    def _copy(
        self, func: Any, args: Any, kwargs: Any, reads: list[Tensor], writes: list[Tensor], stream: str, line: CallSite
    ) -> None:
        """A copy between host and device: the host waits for it, or reads its memory before it goes on, or both are
        left to the stream.
        """
        on_host = next(one for one in (*reads, *writes) if not is_on_device(one))
        non_blocking = is_non_blocking(func, args, kwargs)
        to_host = any(one is on_host for one in writes)
        pinned = self._gpu.is_pinned(on_host) or becomes_pinned(func, non_blocking=non_blocking, to_host=to_host)
        by_stream = is_on_device if not pinned else lambda _: True
        what = f"a copy to {'the host' if to_host else 'the device'}"
        self._launch(stream, what, line, filter(by_stream, reads), filter(by_stream, writes))
        if not non_blocking or (to_host and not pinned):
            self._order.wait_for(HOST, stream)

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        written, read = _OF_COLLECTIVES[name]
        options = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        is_message = name in ("send", "recv_")
        caller = self._streams.launching(()).name
        group = ProcessGroup.unbox(options["process_group"])
        actor = f"the stream of group {group.group_name}"
        if is_message and not self._is_batch:
            actor += f" with rank {args[2]}"
        if not is_message and not options.get("async_op", True):
            actor = caller
        touched = [
            list(filter(has_bytes, tensors_in([args[position] for position in positions])))
            for positions in (read, written)
        ]
        line = self._lines.line()
        self._order.wait_for(actor, caller)
        self._launch(actor, name.strip("_"), line, *touched)
        out = func(*args, **kwargs)
        if actor == caller:
            return out
        work = _Work(self, self._order.clock(actor), [one for ones in touched for one in ones])
        self._works.add(work)
        return (*out[:-1], work.boxed()) if isinstance(out, tuple) else work.boxed()

    def waited_for(self, work: _Work, known: Clock) -> None:
        """Have the current stream wait for a collective, which lets its tensors go."""
        self._order.wait(self._streams.current().name, known)
        self._works.discard(work)

    def _block(self, tensor: Tensor, owner: str, line: CallSite) -> Allocation:
        """The memory of a tensor, which is new if it was not seen before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            owner = owner if is_on_device(tensor) else HOST
            self._blocks[key] = self._order.allocate(owner, storage.nbytes(), line)
            weakref.finalize(storage, self._free, key)
        return self._blocks[key]

    def _part(self, tensor: Tensor) -> _Part:
        # One that is met as an argument was there before anybody looked.
        block = self._block(tensor, self._streams.default.name, _BEFORE)
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        reach = sum((n - 1) * stride for n, stride in zip(map(int, tensor.shape), tensor.stride(), strict=True))
        return block, start, start + (reach + 1) * size

    def _free(self, key: int) -> None:
        if (block := self._blocks.pop(key, None)) is not None and block.owner != HOST:
            self._order.free(block)

    def _resize(self) -> Any:
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, num_bytes: int) -> Any:
            block = self._blocks.get(storage._cdata)
            if block is not None and block.owner != HOST and num_bytes != block.num_bytes:
                self._order.free(block)
                owner = self._streams.launching(()).name
                self._blocks[storage._cdata] = (
                    self._order.allocate(owner, num_bytes, self._lines.line()) if num_bytes else Allocation(owner, 0)
                )
            return original(storage, num_bytes)

        return resize

    def _batching(self, original: Any) -> Any:
        def batch_isend_irecv(ops: Any) -> Any:
            self._is_batch = True
            try:
                return original(ops)
            finally:
                self._is_batch = False

        return batch_isend_irecv

    def _announce(self, tensor: Tensor, stream: str) -> None:
        if has_bytes(tensor) and is_on_device(tensor):
            self._block(tensor, self._streams.default.name, _BEFORE).announced.add(stream)

    def _host_waits(self, _: Any = None) -> None:
        self._order.wait_for(HOST, self._streams.current().name)

    def _then(self, first: Any, second: Any) -> Any:
        def both(*args: Any) -> None:
            first(*args)
            second(*args)

        return both


class _Work(Work):
    """A collective that nobody has waited for, with its tensors."""

    def __init__(self, watch: OrderWatch, known: Clock, tensors: list[Tensor]) -> None:
        super().__init__()
        self._watch, self._known, self._tensors = watch, known, tensors

    def wait(self, timeout: Any = None) -> bool:
        self._watch.waited_for(self, self._known)
        self._tensors = []
        return True


_BEFORE = CallSite("nowhere")

# Of PyTorch's operators, whose schemas do not say: positions of the tensors that are written, and of those that are read.
_OF_COLLECTIVES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "allreduce_": ((0,), ()),
    "allreduce_coalesced_": ((0,), ()),
    "broadcast_": ((0,), ()),
    "_allgather_base_": ((0,), (1,)),
    "allgather_into_tensor_coalesced_": ((0,), (1,)),
    "_reduce_scatter_base_": ((0,), (1,)),
    "reduce_scatter_tensor_coalesced_": ((0,), (1,)),
    "alltoall_base_": ((0,), (1,)),
    "send": ((), (0,)),
    "recv_": ((0,), ()),
    "barrier": ((), ()),
}
