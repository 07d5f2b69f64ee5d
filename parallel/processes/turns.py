"""Work that one rank does for the others, who wait without a limit: outside of collectives, which have one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

_LOOK_EVERY_S = 0.2
_calls = itertools.count()


def in_turns(work: Callable[[], T], *, is_first_of_machine: bool) -> T:
    """Call `work` on rank 0, then on the first rank of each machine, then on all others; return its result. Collective.

    A rank that finds an earlier rank's file on its disk has nothing to do: one file is made if the machines share a
    folder, and one per machine if not. A rank that fails leaves the others waiting, until what watches over the
    ranks ends them.

    Args:
        work: called once on every rank.
        is_first_of_machine: this rank is the first of its machine; every machine has one.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    store = dist.PrefixStore(f"turns/{next(_calls)}", dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    goes_ahead = rank == 0 or is_first_of_machine
    store.add("ahead", int(goes_ahead))
    if store.add("counted", 1) == dist.get_world_size():
        store.set("all are counted", "")
    if rank > 0:
        _wait(store, "rank 0 is done" if goes_ahead else "who goes ahead is done")
    result = work()
    if rank == 0:
        store.set("rank 0 is done", "")
    if goes_ahead:
        _wait(store, "all are counted")
        if store.add("done", 1) == store.add("ahead", 0):
            store.set("who goes ahead is done", "")
    return result


def _wait(store: dist.Store, key: str) -> None:
    # Not `store.wait`, which has a limit, and holds the connection meanwhile.
    while not store.check([key]):
        time.sleep(_LOOK_EVERY_S)
