"""One local rank: the forked process, seen from inside (what it sets up, how it reports) and from its parent (how it ends).

Forking instead of spawning shares one warm parent's imports, so that several ranks start in tenths of a second. Linux only, and only from
a parent that has neither used CUDA nor made a process group: neither survives a fork. (Nor do OpenMP threads; those can be ended before.)
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from parallel.rank_errors import Failure
from parallel.ranks import RENDEZVOUS_VARIABLE

# Asks a rank to write where it stands into its stack file.
STACKS_SIGNAL = signal.SIGUSR1

# The parent forwards these; a rank starts with Python's default for them.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_PR_SET_PDEATHSIG = 1
_OMP_PAUSE_SOFT = 1


@dataclass(frozen=True)
class RankPlan:
    """What one rank needs to know to start."""

    rank: int
    num_ranks: int
    rendezvous: str
    """URL for `init_process_group`."""
    num_threads: int
    log: Path | None
    """File for stdout and stderr; None leaves them where the parent's go."""
    stacks: Path
    """File for the stack dumps that `STACKS_SIGNAL` asks for."""


@dataclass
class RankProcess:
    """A forked rank as its parent sees it.

    The process is not reaped before `reap()`: until then its pid, which is also the id of its process group, cannot be given to
    anyone else, and signalling the group cannot hit a stranger.
    """

    plan: RankPlan
    pid: int
    pipe: int
    """Read end of the pipe on which the rank sends its result or failure."""
    log_start: int
    """Size of the log when the rank started: a resumed run appends."""
    received: bytearray = field(default_factory=bytearray)
    result: Any = None
    failure: Failure | None = None
    ended: bool = False

    @property
    def rank(self) -> int:
        return self.plan.rank

    def read(self) -> bool:
        """Take in what the rank has sent so far. Returns False once the pipe is at its end."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.pipe, 1 << 20):
                self.received += chunk
            return False
        return True

    def poll(self) -> bool:
        """Notice the rank's end. Returns True in the one call that does; `result` or `failure` is set then."""
        if self.ended:
            return False
        code, killed_by = None, None
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                return False
            if status.si_code == os.CLD_EXITED:
                code = status.si_status
            else:
                killed_by = status.si_status
        except ChildProcessError:
            # A parent that ignores SIGCHLD never learns how its children ended: the report below has to do.
            pass
        self.ended = True
        self.read()
        self._conclude(code, killed_by)
        return True

    def _conclude(self, code: int | None, killed_by: int | None) -> None:
        now_s = time.monotonic()
        outcome = None
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            outcome = pickle.loads(self.received)
        # A failure that was sent explains more than the signal that may have ended the rank after it.
        if isinstance(outcome, Failure):
            self.failure = outcome
        elif killed_by is not None:
            self.failure = Failure.from_signal(self.rank, now_s, killed_by)
        elif outcome is None:
            self.failure = Failure.from_exit(self.rank, now_s, code)
        else:
            (self.result,) = outcome

    def signal(self, number: int) -> None:
        """Signal the rank itself, not its data workers or checkpoint writers. One that has ended is left alone."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_tree(self, number: int) -> None:
        """Signal the rank and everything below it: its process group, and whatever left the group while the rank still lives."""
        strays: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            strays = psutil.Process(self.pid).children(recursive=True)
        for target, send in ((self.pid, os.killpg), (self.pid, os.kill)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(target, number)
        for stray in strays:
            with contextlib.suppress(psutil.Error):
                stray.send_signal(number)

    def reap(self, patience_s: float = 10.0) -> None:
        """Kill what is left of the rank and its children and release the process id.

        A process stuck in the kernel (a dead network disk) cannot be killed: it is left behind after `patience_s`.
        """
        self.signal_tree(signal.SIGKILL)
        os.close(self.pipe)
        give_up_s = time.monotonic() + patience_s
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0) and time.monotonic() < give_up_s:
                time.sleep(0.005)

    def log_tail(self, num_lines: int = 30) -> str:
        """The last lines that the rank printed, if that went to a file."""
        if self.plan.log is None or not self.plan.log.exists():
            return ""
        with self.plan.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.log_start, size - 64 * 1024))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def fork_rank(main: Callable[[], Any], plan: RankPlan) -> RankProcess:
    """Fork a rank that runs `main`. Only the parent returns from this function."""
    log_start = plan.log.stat().st_size if plan.log is not None and plan.log.exists() else 0
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    parent_pid = os.getpid()
    pid = fork_quietly()
    if pid == 0:
        _run_rank(main, plan, write_end, parent_pid)
    os.close(write_end)
    return RankProcess(plan, pid, read_end, log_start)


def fork_quietly() -> int:
    """`os.fork()` with nothing left in the streams' buffers to be written twice. The child starts with stop signals blocked."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # A stop signal between the fork and the child's own handlers would run the parent's handlers in the child.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = -1
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about any thread, also those that numpy's BLAS knows how to fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    return pid


def release_openmp_threads() -> None:
    """End the threads of this thread's OpenMP pool; the next parallel region starts new ones.

    A fork copies the pool's bookkeeping but not its threads, and GNU's OpenMP then waits for them for ever in the child's first large
    tensor operation. (Intel's and LLVM's notice the fork themselves.)
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    names = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    for name in names:
        if "libgomp" in name:
            # Absent before GCC 9.
            pause = getattr(ctypes.CDLL(name), "omp_pause_resource_all", None)
            if pause is not None:
                pause(_OMP_PAUSE_SOFT)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is gone. (The parent's *thread* that forked it, to be exact.)"""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def fork_guardian(ranks: Sequence[RankProcess], scratch: Path) -> tuple[int, int]:
    """Fork a process that outlives a killed parent for as long as it takes to kill the ranks' own children and remove `scratch`.

    The kernel kills the ranks themselves when their parent is gone, but not the data workers and checkpoint writers below them.

    Returns:
        The guardian's pid and the write end of the pipe whose end of file it waits for. Kill the guardian before closing the pipe.
    """
    read_end, write_end = os.pipe()
    pid = fork_quietly()
    if pid != 0:
        os.close(read_end)
        return pid, write_end
    try:
        os.setsid()
        for number in (*STOP_SIGNALS, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Whoever reads the parent's output to its end must not have to wait for this process too.
        os.dup2(read_end, 0)
        os.closerange(1, os.sysconf("SC_OPEN_MAX"))
        while os.read(0, 1):
            pass
        for rank in ranks:
            rank.signal_tree(signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)
    finally:
        os._exit(0)


def _run_rank(main: Callable[[], Any], plan: RankPlan, report: int, parent_pid: int) -> NoReturn:
    """The whole life of the child. Leaves by `os._exit`: the parent's atexit handlers and fixtures are not the child's to run."""
    status = 1
    try:
        _enter(plan, parent_pid)
        outcome, status = _outcome_of(main, plan.rank)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sent = 0
        while sent < len(outcome):
            sent += os.write(report, outcome[sent:])
        # The parent kills the rank's process group; what left the group can be told to be the rank's only while the rank lives.
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    finally:
        os._exit(status)


def _outcome_of(main: Callable[[], Any], rank: int) -> tuple[bytes, int]:
    """Run `main`. Returns its pickled result (in a tuple) or failure, and the exit status."""
    try:
        try:
            result = main()
        except SystemExit as stop:
            if stop.code:
                raise
            result = None
        return pickle.dumps((result,)), 0
    except BaseException as error:
        at_s = time.monotonic()
        # Another rank's failure may have the parent take this one down: the report must get out first.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            error.__traceback__ = error.__traceback__.tb_next
        failure = Failure.from_exception(rank, at_s, error)
        return pickle.dumps(failure), failure.exit_code & 0xFF or 1


def _enter(plan: RankPlan, parent_pid: int) -> None:
    """Make the fork a rank: own session, own streams, own environment, own handlers."""
    die_with_parent(parent_pid)
    # An own session: Ctrl-C reaches the parent alone, which decides, and the group can be killed as one.
    os.setsid()
    _redirect_streams(plan.log)
    faulthandler.enable(file=2)
    # Opened without a `with`: it stays open for as long as the process lives.
    faulthandler.register(
        STACKS_SIGNAL, file=os.open(plan.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND), all_threads=True
    )
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ |= {
        "RANK": str(plan.rank),
        "LOCAL_RANK": str(plan.rank),
        "WORLD_SIZE": str(plan.num_ranks),
        "LOCAL_WORLD_SIZE": str(plan.num_ranks),
        RENDEZVOUS_VARIABLE: plan.rendezvous,
        # For programs that the rank starts; the rank itself has read it long ago.
        "OMP_NUM_THREADS": str(plan.num_threads),
    }
    if any(name == "lo" for _, name in socket.if_nameindex()):
        # All ranks are on this machine, whose own name may resolve to nothing or to a VPN.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(plan.num_threads)


def _redirect_streams(log: Path | None) -> None:
    """Give the rank no input, and its log as output. Python's streams are made anew: a test runner may have replaced them."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if log is not None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    # Line by line, so that a log is complete up to the moment in which its rank is killed.
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
