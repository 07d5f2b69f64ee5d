"""The failure of one rank ends the others, wherever they wait.

Our own launcher sees its ranks fail. If something else has started them, the others learn nothing of it: they wait in
their next collective, for as long as `parallel.timeout_minutes` says. Here the rank that fails leaves a word in the
store where the ranks met, and a thread of every rank looks there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from parallel.processes.rank_errors import RankFailure
from parallel.processes.ranks import RankEnvironment, said_by_variables_alone

LOOK_EVERY_S = 2.0
PATIENCE_S = 10.0
"""Longest wait for a rank to fail by itself: most failures meet all ranks at once, each with its own last words."""
LOST_S = 60.0
"""Longest time that the store may be out of reach before the rank that keeps it counts as dead."""

_WAIT_FOR_OTHERS_S = 120.0
"""Longest wait for the others, who may still be importing, to tell them of an error before all met."""
_WAIT_FOR_ANYBODY_S = 60.0
"""Longest wait where nobody may come: variables speak of others, and no launcher is known that has set them."""

_FAILURE = "megamem/failure"
_NUM_INFORMED = "megamem/informed"


@contextmanager
def failures_shared(store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """Until the block ends, tell the other ranks of an error that leaves it, and end this process for one of theirs.

    Args:
        store: meeting place of the ranks; they share it, and rank 0 may be the one that keeps it.
    """
    watch = FailureWatch(store, rank, world_size)
    watch.start()
    try:
        yield
    except BaseException as error:
        watch.stop()
        watch.tell(RankFailure.from_exception(rank, error))
        error.known_to_all_ranks = True  # type: ignore[attr-defined]
        raise
    watch.stop()


def tell_who_waits(ranks: RankEnvironment, error: BaseException) -> None:
    """Let the others know of an error that ended this rank before it met them.

    An error that every rank reports by itself (of the configuration) takes a few seconds more for it; one that only
    this rank met (its GPU, its disk) does not leave the others waiting.
    """
    if ranks.are_watched or ranks.world_size == 1 or getattr(error, "known_to_all_ranks", False):
        return
    patience_s = _WAIT_FOR_OTHERS_S if said_by_variables_alone() is None else _WAIT_FOR_ANYBODY_S
    waiting = f"telling the other ranks, which may take {patience_s:.0f} s; Ctrl-C ends the waiting"
    print(waiting, file=sys.stderr, flush=True)
    # PyTorch's own attempts to reach nobody end with a page of its frames.
    if ranks.rank != 0 and not _is_reachable(ranks, patience_s):
        return
    with contextlib.suppress(RuntimeError, OSError):
        store, _, _ = next(
            dist.rendezvous(ranks.init_method, ranks.rank, ranks.world_size, timeout=timedelta(seconds=patience_s))
        )
        FailureWatch(store, ranks.rank, ranks.world_size).tell(RankFailure.from_exception(ranks.rank, error))


def _is_reachable(ranks: RankEnvironment, patience_s: float) -> bool:
    """True if somebody listens at the ranks' address within `patience_s`."""
    address = ranks.address()
    if address is None:
        return True
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            socket.create_connection(address, timeout=patience_s).close()
        except OSError:
            time.sleep(LOOK_EVERY_S / 10)
        else:
            return True
    return False


class FailureWatch:
    """One rank's eye on the failures of all."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, end: Callable[[str, int], None] | None = None
    ) -> None:
        """`end` gets the last words and the exit code; by default it prints them and ends the process."""
        # A connection of its own: the one of the process is taken for as long as it waits for another rank.
        self._store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=5 * LOOK_EVERY_S))
        self._rank, self._world_size = rank, world_size
        self._end = end or end_process
        self._over = threading.Event()
        self._is_informed = False
        self._thread = threading.Thread(target=self._watch, name="watch for failures of other ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No failure ends this process any more."""
        self._over.set()
        self._thread.join()

    def tell(self, failure: RankFailure) -> None:
        """Let the other ranks know, unless another failure came first; rank 0 waits a moment for them to hear of it."""
        try:
            self._store.compare_set(_FAILURE, "", f"{failure.rank} {failure.exit_code} {failure.message}")
            self._count_myself()
            until = time.monotonic() + 3 * LOOK_EVERY_S
            # With rank 0 the store may end.
            while self._rank == 0 and time.monotonic() < until:
                if self._store.add(_NUM_INFORMED, 0) >= self._world_size:
                    break
                time.sleep(LOOK_EVERY_S / 10)
        except RuntimeError:
            # Whoever keeps the store is gone, and the others see that too.
            return

    def _count_myself(self) -> None:
        if not self._is_informed:
            self._is_informed = True
            self._store.add(_NUM_INFORMED, 1)

    def _watch(self) -> None:
        seen_at = time.monotonic()
        while not self._over.wait(LOOK_EVERY_S):
            try:
                if not self._store.check([_FAILURE]):
                    seen_at = time.monotonic()
                    continue
                rank, exit_code, message = self._store.get(_FAILURE).decode(errors="replace").split(" ", 2)
                self._count_myself()
            except RuntimeError:
                if time.monotonic() - seen_at < LOST_S:
                    continue
                rank, exit_code, message = "0", "1", "its store cannot be reached any more"
            if not self._over.wait(PATIENCE_S):
                self._end(f"rank {self._rank} ends because rank {rank} failed: {message}", int(exit_code))
            return


def end_process(last_words: str, exit_code: int) -> NoReturn:
    """Say something and exit at once, whatever the other threads wait for."""
    sys.stdout.flush()
    print(f"\n{last_words}", file=sys.stderr, flush=True)
    os._exit(exit_code)
