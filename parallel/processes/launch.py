"""Run a function on several ranks of this machine and bring back their results, or the first cause of their failure.

Used by the commands that start their own ranks and by the distributed tests. Three generations of processes: this one
only passes on stop signals; its fork, the supervisor, forks the ranks and waits for them. Whatever a rank leaves behind
the kernel gives to the supervisor, which kills all of it at the end: of the ranks, or of this process, of which the
kernel tells it by SIGHUP.

`parallel.processes.rank_process` is one rank, `parallel.processes.rank_errors` how ranks fail, `parallel.processes.ranks` how a rank learns its
number.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import torch

from parallel.processes.parent_death import signal_on_parent_death
from parallel.processes.rank_errors import (
    FailureKind,
    LaunchError,
    RankError,
    RankFailure,
    RanksInterrupted,
    first_cause,
)
from parallel.processes.rank_process import RankPlan, release_openmp_threads, run_rank
from parallel.processes.stop_signals import STOP_SIGNALS

__all__ = ["LaunchError", "RankError", "RanksInterrupted", "launch_ranks"]

T = TypeVar("T")

# Tells the supervisor to end the ranks because nobody waits for them any more.
_ABANDON = signal.SIGHUP
_AWAITED = frozenset({signal.SIGCHLD, _ABANDON, *STOP_SIGNALS})

# How long the other ranks may take to end by themselves after a failure. Who lost its connection may be seen before the
# true cause.
_PATIENCE_S = 5.0
# The same after the first rank that stopped as it was asked to: another may still send off its last metrics.
_STOP_PATIENCE_S = 30.0
# How long a killed process may take to go. One that is stuck in the kernel (a dead network disk) must not hold up the
# report.
_KILL_PATIENCE_S = 10.0

# Whoever stops a service or a job signals all of its processes, so one request reaches the supervisor from there, from
# the launcher and from whoever started that. The same signal within so many seconds is a copy of the first.
_SAME_REQUEST_S = 1.0

# A wait in C that begins just after a signal came does not see it; Python calls the handler when it ends.
_SIGNAL_PATIENCE_S = 1.0

_PR_SET_CHILD_SUBREAPER = 36


def launch_ranks(
    main: Callable[[], T],
    num_ranks: int,
    *,
    log_dir: Path | None = None,
    num_threads: int | None = None,
) -> list[T]:
    """Fork `num_ranks` ranks of this process, run `main` in each, and return what they returned, by rank.

    `main` finds its place with `parallel.processes.ranks.current_ranks()`. Rank 0 writes where this process writes; the others
    write to `log_dir/rank_<k>.log`, and whatever happens, all of them and their children are gone when this function
    returns. SIGINT, SIGTERM and SIGUSR1 are passed on to the ranks as one SIGTERM, to finish their step and save; a
    later one kills them, unless it is another copy of the first. One that this process ignores, as a shell has its
    background jobs ignore SIGINT, stays ignored.

    Call it from a warm parent: torch and Megatron imported, but no process group made and no call that initialises CUDA
    before it. `torch.cuda.is_available()` is one, unless `keep_cuda_out_of_this_process` (parallel.machine.devices) came before
    torch was imported; nothing can tell afterwards but the forks themselves, which then say so.

    Args:
        main: called once in every rank; any closure, since ranks are forked. Its result must be picklable. Ending by
            `sys.exit(0)` returns None.
        num_ranks: number of ranks, at least one.
        log_dir: folder for the logs of the ranks but 0, made if missing, appended to; without it only a failed rank's
            last lines are seen.
        num_threads: torch threads per rank; by default see `threads_per_rank`.

    Raises:
        ValueError: `num_ranks` or `num_threads` is below one.
        RuntimeError: this process cannot be forked any more.
        RankError: a rank raised, was killed or exited. Carries the first cause and the exit code for the command.
        RanksInterrupted: a signal ended the ranks before they stopped by themselves.
    """
    if num_ranks < 1 or (num_threads is not None and num_threads < 1):
        raise ValueError(f"cannot start {num_ranks} ranks with {num_threads} threads each: both must be 1 or more")
    _check_forkable()
    num_threads = num_threads or threads_per_rank(num_ranks)
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megamem_ranks_")))
        plans = []
        for rank in range(num_ranks):
            path = (log_dir or scratch) / f"rank_{rank}.log"
            log = None if rank == 0 else stack.enter_context(path.open("a+b"))
            log_start = 0 if log is None else log.tell()
            failure = multiprocessing.Pipe(duplex=False)
            plans.append(RankPlan(rank, num_ranks, num_threads, scratch, log, log_start, failure))
        error = _run_supervisor(main, plans)
        if error is not None:
            raise error
        return [pickle.loads(plan.result.read_bytes()) for plan in plans]


def _check_forkable() -> None:
    """Refuse what would hang or crash in the children, while the cause can still be named."""
    if sys.platform != "linux":
        raise RuntimeError(f"local ranks need Linux, and this is {sys.platform}: start the ranks with torchrun")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            "this process already has a process group, which a fork would break: start the ranks before it is made"
        )
    if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            "this process has already used the GPU, which its forks then cannot: start the ranks before that"
        )


def _run_supervisor(main: Callable[[], Any], plans: Sequence[RankPlan]) -> LaunchError | None:
    """Fork the supervisor and wait for its end, passing on stop signals. Returns what it says of the ranks."""
    release_openmp_threads()
    # Not a file: a full disk may be what the verdict is about.
    verdict, sender = multiprocessing.Pipe(duplex=False)
    supervisor = multiprocessing.get_context("fork").Process(target=_supervise, args=(main, plans, sender, os.getpid()))

    def send(number: int, _: object = None) -> None:
        assert supervisor.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor.pid, number)

    # Only the main thread has handlers. A signal that is ignored stays so: nohup and shells ask for that.
    heeded = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: old for number in heeded if (old := signal.getsignal(number)) is not signal.SIG_IGN}
    # The supervisor starts with them blocked: none of this process's handlers may run in it.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about any thread, also those that numpy's BLAS knows how to fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            supervisor.start()
        for number in handlers:
            signal.signal(number, send)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        while not wait([verdict, supervisor.sentinel], timeout=_SIGNAL_PATIENCE_S):
            pass
        if not verdict.poll():
            return LaunchError("the process that watches over the ranks died before they did: start again")
        error: LaunchError | None = verdict.recv()
        supervisor.join()
        return error
    finally:
        if supervisor.is_alive():
            send(_ABANDON)
            supervisor.join()
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _supervise(main: Callable[[], Any], plans: Sequence[RankPlan], verdict: Connection, launcher_pid: int) -> NoReturn:
    """The whole life of the supervisor. All signals that it cares for are blocked, and waited for in `_watch`."""
    # An own session: Ctrl-C reaches the launcher alone, which decides.
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal_on_parent_death(_ABANDON, launcher_pid)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        error = _watch(main, plans)
    finally:
        _kill_descendants()
    if os.getppid() == launcher_pid:
        verdict.send(error)
    else:
        shutil.rmtree(plans[0].scratch, ignore_errors=True)
    os._exit(0)


def _watch(main: Callable[[], Any], plans: Sequence[RankPlan]) -> LaunchError | None:
    """Start the ranks and wait until all have ended, or failed. Returns what the caller should see."""
    context = multiprocessing.get_context("fork")
    running = {plan: context.Process(target=run_rank, args=(main, plan, os.getpid())) for plan in plans}
    for rank in running.values():
        rank.start()
    failures: list[RankFailure] = []
    stopped_by: int | None = None
    stopped_at_s = -math.inf
    deadline_s = math.inf
    while running and (left_s := deadline_s - time.monotonic()) > 0:
        found = signal.sigtimedwait(_AWAITED, min(left_s, threading.TIMEOUT_MAX))
        number = signal.SIGCHLD if found is None else found.si_signo
        is_copy = number == stopped_by and time.monotonic() < stopped_at_s + _SAME_REQUEST_S
        if number == _ABANDON or (number in STOP_SIGNALS and stopped_by is not None and not is_copy):
            return RanksInterrupted(stopped_by or number)
        if number in STOP_SIGNALS and not is_copy:
            stopped_by, stopped_at_s = number, time.monotonic()
            for rank in running.values():
                rank.terminate()
        for plan in [plan for plan, rank in running.items() if not rank.is_alive()]:
            failure = _failure(plan, running.pop(plan).exitcode)
            if failure is not None:
                failures.append(failure)
                patience_s = _STOP_PATIENCE_S if failure.kind is FailureKind.STOPPED else _PATIENCE_S
                deadline_s = min(deadline_s, time.monotonic() + patience_s)
    if not failures:
        return None
    cause = first_cause(failures)
    if cause.kind is FailureKind.TERMINATED and stopped_by is not None:
        return RanksInterrupted(stopped_by)
    return RankError(cause, plans[cause.rank].log_tail())


def _failure(plan: RankPlan, exitcode: int | None) -> RankFailure | None:
    """Failure of a rank that has ended; None if it left a result."""
    if plan.result.exists():
        return None
    if plan.failure[0].poll():
        # Its own report explains more than the signal that may have ended it afterwards.
        failure: RankFailure = plan.failure[0].recv()
        return failure
    return RankFailure.from_exitcode(plan.rank, exitcode or 0)


def _kill_descendants() -> None:
    """Kill all processes below this one. Those whose parents are dead count: they are this one's children now."""
    give_up_s = time.monotonic() + _KILL_PATIENCE_S
    while (found := psutil.Process().children(recursive=True)) and time.monotonic() < give_up_s:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.005)


def threads_per_rank(num_ranks: int) -> int:
    """Torch threads of each rank of this machine: as many as OMP_NUM_THREADS says, or else the cores that this process may
    use, divided by the ranks."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) else max(1, len(os.sched_getaffinity(0)) // num_ranks)
