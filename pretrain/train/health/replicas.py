"""Comparison of replicas: weights that several ranks hold are equal bit for bit, or a rank's hardware is wrong.

The hash of a tensor is sum_i b_i (2 i + 1) mod 2^64, with b_i the bits of element i as an integer: sums of integers have
no order, and an odd factor keeps every change of a single element visible.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.engine.chunks import unwrap
from pretrain.engine.nonfinite import named_globally
from pretrain.errors import UserError
from pretrain.run.history import Incident, now
from pretrain.train.callback import Callback, Priority, Row
from pretrain.train.run import Run

PART_ELEMENTS = 1 << 22
"""Elements hashed at once: 64 MB of temporaries."""
_INTEGER_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMES_IN_WORDS = 3


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor of which not all replicas are equal, as one rank sees it.

    Attributes:
        replicas: the ranks that hold it.
        name: name of the tensor.
        rank, host: number of the rank that reports, and its machine.
        digest: digest of its own replica.
    """

    replicas: tuple[int, ...]
    name: str
    rank: int
    host: str
    digest: int


def digest(tensor: Tensor) -> Tensor:
    """[] int64 on the tensor's device: the hash of a contiguous tensor, or of a matrix whose rows lie apart."""
    whole = tensor.detach()
    if whole.is_contiguous():
        parts = whole.view(-1).split(PART_ELEMENTS)
    else:
        parts = whole.split(max(1, PART_ELEMENTS // whole.shape[1]))
    total, first = torch.zeros((), dtype=torch.int64, device=tensor.device), 1
    for part in parts:
        bits = part.reshape(-1).view(_INTEGER_OF_BYTES[tensor.element_size()]).to(torch.int64)
        factors = torch.arange(first, first + 2 * bits.numel(), 2, dtype=torch.int64, device=tensor.device)
        total += (bits * factors).sum()
        first += 2 * bits.numel()
    return total


def differing_replicas(run: Run) -> tuple[ReplicaDifference, ...]:
    """Tensors that differ, as told by every rank that holds a replica; the same on every rank. Collective.

    It takes a small all-reduce for each kind of replica, and one over all ranks.
    """
    run.complete_weights()
    mine: list[ReplicaDifference] = []
    for group, tensors in _replicated(run):
        if group.size() == 1 or not tensors:
            continue
        # Tables in files are in host memory.
        digests = torch.stack([digest(tensor).to(run.groups.device) for tensor in tensors.values()])
        # The largest, and by the complement the smallest, in one.
        ends = torch.stack([digests, ~digests])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
        # Host sync: once in so many steps, at their boundary.
        differ, values = (ends[0] != ~ends[1]).tolist(), digests.tolist()
        replicas = tuple(dist.get_process_group_ranks(group))
        mine += [
            ReplicaDifference(replicas, name, run.groups.rank, socket.gethostname(), value)
            for name, value, differs in zip(tensors, values, differ, strict=True)
            if differs
        ]
    found = torch.tensor(len(mine), device=run.groups.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    # Host sync: as above.
    if found.item() == 0:
        return ()
    of_all: list[list[ReplicaDifference]] = [[] for _ in range(run.groups.world_size)]
    dist.all_gather_object(of_all, mine)
    return tuple(difference for of_rank in of_all for difference in of_rank)


def _replicated(run: Run) -> Iterator[tuple[dist.ProcessGroup, dict[str, Tensor]]]:
    """Groups of ranks, and what all of a group hold alike, by name.

    Data- and context-parallel ranks hold the same weights, and tensor-parallel ones those that are not split; of these
    they also step main weights of their own. Tables and experts are alike on the replicas of a slice of columns.
    """
    megatron = run.groups.megatron
    dense: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    split: dict[str, Tensor] = {}
    names = {parameter: name for chunk in run.chunks for name, parameter in named_globally(unwrap(chunk))}
    for parameter, name in names.items():
        if not getattr(parameter, "allreduce", True):
            split[name] = parameter.data
            continue
        dense[name] = parameter.data
        if not getattr(parameter, "tensor_model_parallel", False):
            whole[name] = parameter.data
    # Dense parameters have the first optimizer, and the same shares on all tensor-parallel ranks.
    for parameter, main in run.optimizer.chained_optimizers[0].main_weights():
        if names[parameter] in whole:
            whole[f"main weights of {names[parameter]}"] = main
    yield megatron.dp_cp, dense
    yield megatron.tp, whole
    yield megatron.expt_dp, split


def describe_differences(found: tuple[ReplicaDifference, ...]) -> str:
    """Names of the tensors that differ, and their ranks: those in the minority, or all where there is none."""
    tensors: dict[tuple[str, tuple[int, ...]], list[ReplicaDifference]] = {}
    for difference in found:
        tensors.setdefault((difference.name, difference.replicas), []).append(difference)
    texts = []
    for (name, replicas), of_ranks in tensors.items():
        counts = Counter(difference.digest for difference in of_ranks).most_common()
        usual = counts[0][0] if len(counts) > 1 and counts[0][1] > counts[1][1] else None
        ranks = ", ".join(f"{d.rank} ({d.host})" for d in of_ranks if d.digest != usual)
        held = ", ".join(map(str, replicas[:8])) + (", ..." if len(replicas) > 8 else "")
        texts.append(f"{name} on rank {ranks}, of the replicas on ranks {held}")
    more = f"; and {len(texts) - _NAMES_IN_WORDS} tensors more" if len(texts) > _NAMES_IN_WORDS else ""
    return "; ".join(texts[:_NAMES_IN_WORDS]) + more


class Replicas(Callback):
    """Compare replicas every so many steps, and before every checkpoint. All ranks."""

    priority = Priority.COMPARE

    def __init__(self) -> None:
        self._compared: int | None = None

    def on_step(self, run: Run, row: Row) -> None:
        every, saves = run.config.health.compare_replicas_every_steps, run.config.checkpoint.every_steps
        if run.state.step % every == 0 or (saves and run.state.step % saves == 0):
            self._compare(run)

    def on_end(self, run: Run) -> None:
        if self._compared != run.state.step:
            self._compare(run)

    def on_rewind(self, run: Run) -> None:
        self._compared = None

    def _compare(self, run: Run) -> None:
        self._compared = run.state.step
        found = differing_replicas(run)
        if not found:
            return
        # All ranks are here.
        run.saver.finish()
        message = f"replicas differ after step {run.state.step}: {describe_differences(found)}"
        self.callbacks.on_incident(run, Incident(run.state.step, "replicas", message, now()))
        raise UserError(
            f"{message}. Hardware that computes or sends wrongly is likely: take that machine out, and start the run "
            f"again from its newest checkpoint, which is from before it was found (the replicas of every checkpoint in "
            f"{run.folder.checkpoints} were compared before it was written, while this check was on)"
        )
