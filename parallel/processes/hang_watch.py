"""A rank that is not heard of in time writes down where its threads stand, and ends.

A rank that waits in a collective runs no Python of its main thread, so a thread looks at the clock; it needs nothing of
the other ranks. All of them take part in every step, so when one hangs, all are late at the same time: each writes its
own file and ends by itself, whoever started them.
"""

from __future__ import annotations

import faulthandler
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from parallel.processes.failure_watch import end_process

GRACE_S = 10.0
"""Between a rank's stacks and its end: who started the ranks may kill the others when the first one ends."""


class HangWatch:
    """Tells whether the main thread of this rank gets on."""

    def __init__(
        self,
        stacks: Path,
        rank: int,
        verdict: Callable[[], tuple[str, int]],
        *,
        grace_s: float,
        end: Callable[[str, int], None] = end_process,
    ) -> None:
        """
        Args:
            stacks: file to append the stacks of all threads to.
            rank: number of this process.
            verdict: tells what to do next in words, and the exit code; asked when the rank is to end, by another
                thread.
            grace_s: seconds that the rank stays after its stacks are written.
            end: gets the last words and the exit code.
        """
        self._stacks, self._rank, self._verdict = stacks, rank, verdict
        self._grace_s, self._end = grace_s, end
        self._changed = threading.Condition()
        self._awaited = ""
        self._limit_s = self._due_s = 0.0
        self._thread: threading.Thread | None = None

    def expect(self, what: str, within_s: float) -> None:
        """From now on this is awaited, and nothing else; the first call starts the thread."""
        with self._changed:
            former_s = self._due_s
            self._awaited, self._limit_s, self._due_s = what, within_s, time.monotonic() + within_s
            if self._due_s < former_s:
                # The thread sleeps until the former one is due; of a later one it learns then.
                self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="watch for hangs", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Nothing is awaited any more."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _watch(self) -> None:
        me = threading.current_thread()
        with self._changed:
            while self._thread is me and (left_s := self._due_s - time.monotonic()) > 0:
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            if self._thread is not me:
                return
            awaited, limit_s = self._awaited, self._limit_s
        self._give_up(f"rank {self._rank} on {socket.gethostname()}: {awaited} has taken over {limit_s / 60:.3g} min")

    def _give_up(self, found: str) -> None:
        try:
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks.open("a", encoding="utf-8") as stream:
                print(f"{datetime.now(UTC).isoformat(timespec='seconds')} {found}", file=stream, flush=True)
                faulthandler.dump_traceback(stream, all_threads=True)
            where = f"its stacks are in {self._stacks}"
        except OSError as error:
            # The disk may be what hangs, and what failed is told.
            where = f"its stacks could not be written to {self._stacks} ({error}), and follow"
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        print(f"\n{found}; {where}", file=sys.stderr, flush=True)
        time.sleep(self._grace_s)
        advice, exit_code = self._verdict()
        self._end(f"{found}; {where}. {advice}", exit_code)
