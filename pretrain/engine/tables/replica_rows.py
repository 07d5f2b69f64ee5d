"""Rows that the replicas of a table have read, added up on each of them.

Every replica sends its rows and their sums to the others, and adds up all of them in the order of the replicas: the sums, and
with them weights and state, are the same bits on each. No shape depends on data on a GPU.

Legend: n replicas, N rows of a replica, M rows of all of them, W columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.common.row_gradient import DistinctRows, RowGradient, distinct_rows
from kernels.common.tables import row_dtype

# Elements of sums of all replicas that are there at a time.
_WINDOW_ELEMENTS, _WINDOW_ELEMENTS_ON_CPU = 1 << 25, 1 << 22


def add_up_replicas(gradients: Sequence[RowGradient], replicas: dist.ProcessGroup) -> None:
    """Have gradients hold the rows and sums of all replicas, which have the same tables in this order. Collective."""
    if replicas.size() == 1:
        return
    # By the rows of one replica: tables that the same lookups read share them.
    known: dict[int, tuple[DistinctRows, DistinctRows, Tensor]] = {}
    for gradient in gradients:
        own, sums = gradient.read, gradient.sums
        if own is None or sums is None:
            continue
        if id(own) not in known:
            # Kept with its result, so that no other rows get its number.
            known[id(own)] = own, *_rows_of_all(own, gradient.num_rows, replicas)
        _, read, slots = known[id(own)]
        gradient.read, gradient.sums = read, _sums_of_all(sums, slots, read.rows.numel(), replicas)


def _rows_of_all(own: DistinctRows, num_rows: int, replicas: dist.ProcessGroup) -> tuple[DistinctRows, Tensor]:
    """Rows of all replicas, and the places [n, N] of each replica's among them."""
    # Its numbers, and one that is none of them.
    ids = own.rows.to(row_dtype(num_rows + 1))
    if own.sources is None:
        # On a CPU ranks have other numbers of rows.
        most = torch.tensor([len(ids)])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=replicas)
        # Host sync: none on a CPU.
        ids = torch.nn.functional.pad(ids, (0, int(most) - len(ids)), value=num_rows)
    else:
        # Behind the last they repeat the first.
        ids = torch.where(own.sources == torch.arange(len(ids), device=ids.device), ids, num_rows)
    of_all = _gathered(ids, replicas)
    found, (slots,) = distinct_rows([of_all], num_rows)
    if own.counts is None:
        return found, slots
    counts = torch.nn.functional.pad(own.counts.to(torch.int32), (0, len(ids) - len(own.counts)))
    counts = _gathered(counts, replicas).view(-1).long()
    # Entries without a place have no reads.
    sums = counts.new_zeros(found.rows.numel()).scatter_add_(0, slots.clamp(min=0).view(-1).long(), counts)
    return replace(found, counts=sums), slots


def _gathered(own: Tensor, replicas: dist.ProcessGroup) -> Tensor:
    """[n, N] of the [N] of each replica."""
    of_all = own.new_empty(replicas.size(), len(own))
    dist.all_gather_into_tensor(of_all.view(-1), own, group=replicas)
    return of_all


def _sums_of_all(sums: Tensor, slots: Tensor, num: int, replicas: dist.ProcessGroup) -> Tensor:
    """Sums [M, W] of the sums [N, W] of each replica, whose places are `slots` [n, N]; rows without one have sums of 0."""
    added = sums.new_zeros(num, sums.shape[1])
    for columns in _windows(slots.numel(), sums.shape[1], on_cpu=sums.device.type == "cpu"):
        _add_up(sums[:, columns], slots, added[:, columns], replicas)
    return added


def _add_up(sums: Tensor, slots: Tensor, added: Tensor, replicas: dist.ProcessGroup) -> None:
    """Add the sums of each replica to those of all, in some of their columns. What is sent is gone behind it."""
    most = slots.shape[1]
    sent = sums.new_zeros(most, sums.shape[1])
    sent[: len(sums)] = sums
    received = sent.new_empty(replicas.size() * most, sums.shape[1])
    dist.all_gather_into_tensor(received, sent, group=replicas)
    for places, of_replica in zip(slots, received.split(max(1, most)), strict=True):
        # No row of a replica is there twice, but for those without a place, which add nothing.
        added.index_add_(0, places.clamp(min=0), of_replica)


def _windows(num_rows: int, width: int, *, on_cpu: bool) -> Iterator[slice]:
    """Columns of so many rows, as many at a time as a window holds."""
    size = max(1, (_WINDOW_ELEMENTS_ON_CPU if on_cpu else _WINDOW_ELEMENTS) // max(1, num_rows))
    for start in range(0, width, size):
        yield slice(start, min(width, start + size))
