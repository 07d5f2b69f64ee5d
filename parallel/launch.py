"""Run a function on several ranks of this machine and bring back their results, or the first cause of their failure.

Used by the commands that start their own ranks and by the distributed tests. `parallel.rank_process` is one rank, `parallel.rank_errors`
what can go wrong, `parallel.ranks` how a rank learns its number.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from parallel.rank_errors import (
    Failure,
    FailureKind,
    LaunchError,
    RankError,
    RanksInterrupted,
    RankTimeout,
    first_cause,
)
from parallel.rank_process import (
    STACKS_SIGNAL,
    STOP_SIGNALS,
    RankPlan,
    RankProcess,
    fork_guardian,
    fork_rank,
    release_openmp_threads,
)

__all__ = ["LaunchError", "RankError", "RankTimeout", "RanksInterrupted", "launch_ranks"]

T = TypeVar("T")

# Ends are polled: neither pidfd (Linux 5.3) nor SIGCHLD (taken by whoever embeds us) is always there. Output wakes us at once.
_POLL_S = 0.05
# How long to wait for the true cause after a rank lost its connection to another.
_CAUSE_PATIENCE_S = 1.0
# How long ranks may take to write down their stacks.
_STACKS_PATIENCE_S = 3.0
# How long a killed rank may take to go. One that is stuck in the kernel (a dead network disk) must not hold up the report.
_KILL_PATIENCE_S = 10.0


def launch_ranks(
    main: Callable[[], T],
    num_ranks: int,
    *,
    timeout_s: float | None = None,
    log_dir: Path | None = None,
    grace_s: float = 5.0,
    num_threads: int | None = None,
) -> list[T]:
    """Fork `num_ranks` ranks of this process, run `main` in each, and return what they returned, by rank.

    `main` finds its place with `parallel.ranks.current_ranks()`. Rank 0 writes where this process writes; the others write to
    `log_dir/rank_<k>.log`, and whatever happens, all of them and their children are gone when this function returns. SIGINT and
    SIGTERM are passed on to the ranks as one SIGTERM, to finish their step and save; a second one kills them. One that this process
    ignores, as a shell has its background jobs ignore SIGINT, stays ignored: SIGTERM then stops the ranks.

    Call it from a warm parent: torch and Megatron imported, but no process group made and no call that initialises CUDA before it
    (`torch.cuda.is_available()` may, and nothing can tell afterwards).

    Args:
        main: what a rank runs; any closure, since ranks are forked. Its result must be picklable. Ending by `sys.exit(0)` returns None.
        num_ranks: how many ranks.
        timeout_s: kill the ranks after this many seconds and report where each of them stood.
        log_dir: folder for the logs of the ranks but 0, made if missing, appended to; without it only a failed rank's last lines are seen.
        grace_s: seconds between asking ranks to end (SIGTERM) and killing them, once one of them has failed.
        num_threads: torch threads per rank; by default the cores this process may use, divided by the ranks.

    Raises:
        ValueError: `num_ranks` or `num_threads` is below one.
        RuntimeError: this process cannot be forked any more.
        RankError: a rank raised, was killed or exited. Carries the first cause and the exit code for the command.
        RankTimeout: the ranks took longer than `timeout_s`.
        RanksInterrupted: a signal ended the ranks before they stopped by themselves.
    """
    if num_ranks < 1 or (num_threads is not None and num_threads < 1):
        raise ValueError(f"cannot start {num_ranks} ranks with {num_threads} threads each: both must be 1 or more")
    _check_forkable()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="megamem_ranks_") as name, _collected_signals() as signals:
        scratch = Path(name)
        plans = [
            RankPlan(
                rank=rank,
                num_ranks=num_ranks,
                # A file needs no port: nothing to pick before the ranks start, so nothing to collide on.
                rendezvous=(scratch / "rendezvous").as_uri(),
                num_threads=num_threads or max(1, num_cores // num_ranks),
                log=None if rank == 0 else (log_dir or scratch) / f"rank_{rank}.log",
                stacks=scratch / f"rank_{rank}.stacks",
            )
            for rank in range(num_ranks)
        ]
        with _running(main, plans, scratch) as ranks:
            supervisor = _Supervisor(ranks, signals, grace_s)
            supervisor.run(timeout_s)
            supervisor.raise_failure()
            return [rank.result for rank in ranks]


def _check_forkable() -> None:
    """Refuse what would hang or crash in the children, while the cause can still be named."""
    if not hasattr(os, "fork"):
        raise RuntimeError("ranks are started by fork, which this system does not have: use Linux, or torchrun")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            "this process already has a process group, which a fork would break: start the ranks before it is made"
        )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "this process has already used the GPU, which its forks then cannot: start the ranks before that"
        )


@contextlib.contextmanager
def _running(main: Callable[[], T], plans: Sequence[RankPlan], scratch: Path) -> Iterator[list[RankProcess]]:
    """Ranks that exist inside the `with` block and not after it, however it is left."""
    release_openmp_threads()
    ranks: list[RankProcess] = []
    guardian: tuple[int, int] | None = None
    try:
        for plan in plans:
            ranks.append(fork_rank(main, plan))
        guardian = fork_guardian(ranks, scratch)
        yield ranks
    finally:
        # All are killed before any is waited for.
        for rank in ranks:
            rank.signal_tree(signal.SIGKILL)
        for rank in ranks:
            rank.reap()
        if guardian is not None:
            pid, pipe = guardian
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            os.close(pipe)


@contextlib.contextmanager
def _collected_signals() -> Iterator[list[int]]:
    """The stop signals that arrive inside the `with` block, in order. Nothing is collected outside the main thread."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in previous.items():
        # One that is ignored stays so: nohup and shells ask for that.
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class _Supervisor:
    """Waits for ranks to end. Once one fails it takes the others down; once asked to stop it asks them."""

    def __init__(self, ranks: Sequence[RankProcess], signals: Sequence[int], grace_s: float) -> None:
        self.ranks = ranks
        self.signals = signals
        """Filled by the signal handler while `run` waits."""
        self.grace_s = grace_s
        self.num_forwarded = 0
        self.terminate_at_s = float("inf")
        self.kill_at_s = float("inf")
        self.abandon_at_s = float("inf")
        self.takedown_s: float | None = None
        """When SIGTERM went out. What fails later than this fails because of it."""
        self.timeout: RankTimeout | None = None

    def run(self, timeout_s: float | None) -> None:
        """Return when every rank has ended, or was killed and does not go."""
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(rank.pipe, selectors.EVENT_READ, rank)
            while not all(rank.ended for rank in self.ranks) and time.monotonic() < self.abandon_at_s:
                for key, _ in selector.select(_POLL_S):
                    if not key.data.read():
                        selector.unregister(key.fd)
                self._note_ends()
                self._forward_signals()
                self._take_down()
                if timeout_s is not None and time.monotonic() > deadline_s and self.takedown_s is None:
                    self._time_out(timeout_s)

    def _note_ends(self) -> None:
        for rank in self.ranks:
            if rank.poll():
                # Its data workers and writers have no one left to work for.
                rank.signal_tree(signal.SIGKILL)
                if rank.failure is not None:
                    self.terminate_at_s = min(self.terminate_at_s, time.monotonic() + self._patience_s(rank.failure))

    def _patience_s(self, failure: Failure) -> float:
        """How long the others may go on after a failure, to end by themselves."""
        if failure.kind is FailureKind.STOPPED or self._was_asked_to_stop(failure):
            return self.grace_s
        return 0.0 if failure.kind is FailureKind.ERROR else _CAUSE_PATIENCE_S

    def _was_asked_to_stop(self, failure: Failure) -> bool:
        """The rank died of the SIGTERM that was passed on: it had no handler for it (yet)."""
        return self.num_forwarded > 0 and failure.signal_number == signal.SIGTERM

    def _forward_signals(self) -> None:
        if len(self.signals) > 0 and self.num_forwarded == 0:
            self.num_forwarded = 1
            for rank in self.ranks:
                rank.signal(signal.SIGTERM)
        if len(self.signals) > 1:
            self._kill()

    def _take_down(self) -> None:
        now_s = time.monotonic()
        if now_s >= self.terminate_at_s and self.takedown_s is None:
            self.takedown_s = now_s
            self.kill_at_s = now_s + self.grace_s
            for rank in self.ranks:
                if not rank.ended:
                    rank.signal_tree(signal.SIGTERM)
        if now_s >= self.kill_at_s:
            self._kill()

    def _kill(self) -> None:
        now_s = time.monotonic()
        self.takedown_s = now_s if self.takedown_s is None else self.takedown_s
        self.abandon_at_s = min(self.abandon_at_s, now_s + _KILL_PATIENCE_S)
        for rank in self.ranks:
            if not rank.ended:
                rank.signal_tree(signal.SIGKILL)

    def _time_out(self, timeout_s: float) -> None:
        """Have the unfinished ranks write down where they stand, then kill them."""
        unfinished = [rank for rank in self.ranks if not rank.ended]
        for rank in unfinished:
            rank.signal(STACKS_SIGNAL)
        stacks = {rank.rank: "" for rank in unfinished}
        give_up_s = time.monotonic() + _STACKS_PATIENCE_S
        settled = False
        while not settled and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)
            before, stacks = stacks, {rank.rank: _read_text(rank.plan.stacks) for rank in unfinished}
            # A dump is written in many small pieces: it is complete when it has stopped growing.
            settled = all(stacks.values()) and stacks == before
        self.timeout = RankTimeout(
            timeout_s, len(self.ranks), {rank: _own_frames(text) for rank, text in stacks.items()}
        )
        self._kill()

    def raise_failure(self) -> None:
        """Raise what the caller should see, if anything failed."""
        if self.timeout is not None:
            raise self.timeout
        if len(self.signals) > 1:
            raise RanksInterrupted(self.signals[0])
        before_s = float("inf") if self.takedown_s is None else self.takedown_s
        failures = [rank.failure for rank in self.ranks if rank.failure is not None and rank.failure.at_s <= before_s]
        if not failures:
            return
        # A rank without a handler that died as asked hides nothing that went wrong on another.
        cause = first_cause([failure for failure in failures if not self._was_asked_to_stop(failure)] or failures)
        if self._was_asked_to_stop(cause):
            raise RanksInterrupted(self.signals[0])
        raise RankError(cause, self.ranks[cause.rank].log_tail())


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _own_frames(stacks: str) -> str:
    """Leave out of a stack dump the frames that the ranks inherited from their parent: those from the call of `main` on."""
    kept: list[str] = []
    inherited = False
    for line in stacks.splitlines():
        inherited = inherited and line.startswith(" ")
        inherited = inherited or line.endswith(" in _outcome_of")
        if not inherited:
            kept.append(line)
    return "\n".join(kept).rstrip()
