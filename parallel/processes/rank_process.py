"""One local rank from inside: a fork of a warm parent that sets itself up, runs its function and leaves a report.

The ranks' supervisor (`parallel.processes.launch`) and the ranks are forked from the process that asked for them, so they share
its imports and start in tenths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from parallel.machine.atomic_write import atomic_write
from parallel.processes.log_tail import log_tail
from parallel.processes.parent_death import signal_on_parent_death
from parallel.processes.rank_errors import RankFailure
from parallel.processes.ranks import RENDEZVOUS_VARIABLE

_OMP_PAUSE_SOFT = 1
# Most bytes of a message and of a traceback. Together they fit into a pipe, which is read when the rank has ended.
_REPORT_BYTES = 24 * 1024


@dataclass(frozen=True)
class RankPlan:
    """Inputs of one rank at its start, and the places of its output."""

    rank: int
    num_ranks: int
    num_threads: int
    scratch: Path
    """Folder of this launch."""
    log: IO[bytes] | None
    """Open file to append stdout and stderr to; None leaves them where the parent's go."""
    log_start: int
    """Bytes in the log before the rank started: a resumed run appends."""
    failure: tuple[Connection, Connection]
    """Read and write end of a pipe for the `RankFailure` of a rank without a result: a full disk may be what failed. One
    that was killed sends none."""

    @property
    def result(self) -> Path:
        """Path of the rank's result, pickled."""
        return self.scratch / f"rank_{self.rank}.result"

    def log_tail(self) -> str:
        """The last lines that the rank printed, if that went to a file."""
        return "" if self.log is None else log_tail(self.log, self.log_start)


def run_rank(main: Callable[[], Any], plan: RankPlan, parent_pid: int) -> NoReturn:
    """The whole life of a rank."""
    signal_on_parent_death(signal.SIGKILL, parent_pid)
    _enter(plan)
    try:
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError(
                "the process that started this rank has touched the GPU before, which no fork of it can use then: call "
                "parallel.machine.devices.keep_cuda_out_of_this_process() before torch is imported"
            )
        try:
            result = main()
        except SystemExit as stop:
            if stop.code:
                raise
            result = None
        with atomic_write(plan.result) as file:
            file.write(_pickled(result))
    except BaseException as error:
        # This frame is no news.
        trace = error.__traceback__ and error.__traceback__.tb_next
        failure = RankFailure.from_exception(plan.rank, error.with_traceback(trace))
        plan.failure[1].send(failure.shortened(_REPORT_BYTES))
    for stream in (sys.stdout, sys.stderr):
        # Whoever read them may be gone.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Waits for none of the children: the supervisor kills them.
    os._exit(0)


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        # Python's words name no pickle from 3.13 on.
        raise TypeError(f"a rank's result cannot be pickled: {error}") from error


def _enter(plan: RankPlan) -> None:
    """Make the fork a rank: own streams, own environment, own handlers."""
    if plan.log is not None:
        os.dup2(plan.log.fileno(), 1)
        os.dup2(plan.log.fileno(), 2)
    # Made anew, because a test runner may have replaced them; line by line, so that the log of a rank that is killed is
    # complete.
    stdout, stderr = (os.fdopen(i, "w", buffering=1, errors="backslashreplace", closefd=False) for i in (1, 2))
    sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stderr  # type: ignore[misc]
    faulthandler.enable(file=2)
    # The objects that the launcher has loaded stay: collections need neither look at them nor copy their pages.
    gc.freeze()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ |= {
        "RANK": str(plan.rank),
        "LOCAL_RANK": str(plan.rank),
        "WORLD_SIZE": str(plan.num_ranks),
        "LOCAL_WORLD_SIZE": str(plan.num_ranks),
        # A file needs no port: nothing to pick before the ranks start, so nothing to collide on.
        RENDEZVOUS_VARIABLE: (plan.scratch / "rendezvous").as_uri(),
        # For programs that the rank starts; the rank itself has read it long ago.
        "OMP_NUM_THREADS": str(plan.num_threads),
    }
    if any(name == "lo" for _, name in socket.if_nameindex()):
        # All ranks are on this machine, whose own name may resolve to nothing or to a VPN.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(plan.num_threads)


def release_openmp_threads() -> None:
    """End the threads of this thread's OpenMP pool; the next parallel region starts new ones.

    A fork copies the pool's bookkeeping but not its threads, and GNU's OpenMP then waits for them for ever in the
    child's first large tensor operation. (Intel's and LLVM's notice the fork themselves.)
    """
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    for name in {line.split(maxsplit=5)[-1] for line in maps.splitlines()}:
        if "libgomp" in name:
            # Absent before GCC 9.
            pause = getattr(ctypes.CDLL(name), "omp_pause_resource_all", None)
            if pause is not None:
                pause(_OMP_PAUSE_SOFT)
