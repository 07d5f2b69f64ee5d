"""Calls of torch.distributed in a dry run, as they reach PyTorch's operators: who takes part, and with which tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from pretrain.planning.dryrun.lines import CallSite, calling_line
from pretrain.planning.dryrun.operations import tensors_in
from pretrain.planning.dryrun.parts import MemoryPart, part_of_caller

_NOWHERE = CallSite("nowhere")


@dataclass(frozen=True)
class Collective:
    """One call of torch.distributed.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv or barrier.
        axis: the group's name for readers.
        ranks: ranks of the group, or this rank's peer for a message.
        num_bytes: bytes that this rank hands over: its part for an all_gather, all parts for the others.
        part: part of the run that called.
        group: the communicator: PyTorch's name of the group, alike on all ranks.
        content: description of what a rank hands over, which all members must do alike: tensors, sum or mean, root.
        splits: rows of an all_to_all for each member, and rows from each; None: equal ones, or another operation.
        batch: messages with the same number are one call; None: a call of its own.
        line: line of the code that called.
        own: place of this rank in the group, where sizes differ.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    num_bytes: int
    part: MemoryPart
    group: str = ""
    content: str = ""
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    batch: int | None = None
    line: CallSite = _NOWHERE
    own: int = 0

    @property
    def is_message(self) -> bool:
        """True if one rank alone is at the other end."""
        return self.op in ("send", "recv")

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to others, if the library sends no more than it must (a ring, for sums)."""
        size, num_bytes = len(self.ranks), self.num_bytes
        match self.op:
            case "all_gather":
                return num_bytes * (size - 1)
            case "all_to_all" if self.splits is not None:
                rows = self.splits[0]
                return num_bytes * (sum(rows) - rows[self.own]) // max(1, sum(rows))
            case "all_to_all" | "reduce_scatter":
                return num_bytes * (size - 1) // size
            case "all_reduce":
                return 2 * num_bytes * (size - 1) // size
            case "broadcast" | "recv" | "barrier":
                return 0
        return num_bytes


class CallReader:
    """Reads calls of PyTorch's operators; what is equal in many of them is kept once."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        """
        Args:
            axes: a name for readers by PyTorch's name of a group.
        """
        self._axes = axes
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._splits: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._batches = count()
        self._batch: int | None = None

    def read(self, func: Any, args: Any) -> Collective:
        """The call of a `c10d` operator, made by the code that is above on the stack."""
        op, sent = _OPS[func._schema.name.removeprefix("c10d::")]
        group = ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject) and _is_group(a)))
        name = group.group_name
        if name not in self._ranks:
            self._ranks[name] = tuple(dist.get_process_group_ranks(group))
        ranks = self._ranks[name]
        tensors = tensors_in(args[sent])
        content = " and ".join(_shape(tensor) for tensor in tensors) if op != "barrier" else ""
        splits = None
        if op in ("all_reduce", "reduce_scatter"):
            content = f"{_reduction()} of {content}"
        elif op == "broadcast":
            content = f"{content} from rank {ranks[args[2]]}"
        elif op == "all_to_all" and (args[3] or args[4]):
            # Members have different sizes of these; all else about their tensors is alike.
            splits = tuple(args[4]), tuple(args[3])
            splits = self._splits.setdefault(splits, splits)
            content = f"rows of {_shape(tensors[0][:0])}"
        elif op in ("send", "recv"):
            ranks = (ranks[args[2]],)
        return Collective(
            op=op,
            axis=self._axes.get(name, "other"),
            ranks=ranks,
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            part=part_of_caller(),
            group=sys.intern(name),
            content=sys.intern(content),
            splits=splits,
            batch=self._batch,
            line=calling_line(),
            own=ranks.index(dist.get_rank()) if splits is not None else 0,
        )

    @contextmanager
    def reading_batches(self) -> Iterator[None]:
        """Tell messages that are sent together, until the block ends."""
        original = dist.batch_isend_irecv

        def batch_isend_irecv(ops: Any) -> Any:
            self._batch = next(self._batches)
            try:
                return original(ops)
            finally:
                self._batch = None

        with patch("torch.distributed.batch_isend_irecv", batch_isend_irecv):
            yield


def _is_group(arg: torch.ScriptObject) -> bool:
    return str(arg._type()).endswith("ProcessGroup")


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _reduction() -> str:
    """Sum, mean or another operation. PyTorch's operators hide it; its Python functions above on the stack have it."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == dist.distributed_c10d.__name__:
            values = frame.f_locals
            op = values["op_list"][0].redop if values.get("op_list") else values.get("op")
            if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
                return str(op).rpartition(".")[2].lower()
        frame = frame.f_back  # type: ignore[assignment]
    return "some reduction"


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
