"""Failures of a launch of local ranks, and the choice of the cause among several.

When one rank dies the others soon fail too: their collectives break. The user must see the first cause, so
every failure is put in a class (`FailureKind`) and the earliest of the best class is reported.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from torch.distributed import DistError

from parallel.machine.refusals import describe_error, refusal
from parallel.processes.peer_errors import says_peer_is_gone

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGSEGV: " (a defect in native code)",
    signal.SIGBUS: " (/dev/shm full?)",
}


class FailureKind(IntEnum):
    """Classes of failures: the lower, the likelier to be the cause of the others."""

    ERROR = 0
    """The rank raised, exited or was killed for a reason of its own."""
    ABORTED = 1
    """SIGABRT: a defect in native code, or NCCL's watchdog giving up on a rank that is the true cause."""
    STOPPED = 2
    """The rank stopped on request and can be started again (exit code EX_TEMPFAIL): nothing is wrong with it."""
    TERMINATED = 3
    """SIGTERM ended the rank, which had no handler for it (yet)."""
    PEER = 4
    """The rank lost the connection to another one."""


@dataclass(frozen=True)
class RankFailure:
    """End of one rank without a result. Sent from the rank to its parent, so every field is plain data."""

    rank: int
    kind: FailureKind
    message: str
    exit_code: int = 1
    """Exit code for the whole command."""
    traceback: str = ""
    is_user_error: bool = False
    """The exception carried an exit code of its own: its message says all, a traceback would only hide it."""
    at_s: float = field(default_factory=time.monotonic)
    """Time in seconds on the machine's monotonic clock, which all local ranks share."""

    @classmethod
    def from_exception(cls, rank: int, error: BaseException) -> RankFailure:
        """Describe what a rank raised. An integer `exit_code`, or what the system refuses, marks a user's error; `SystemExit`
        keeps its code."""
        exit_code, is_user_error = 1, False
        if isinstance(error, SystemExit):
            # sys.exit("text") is Python's own way to say: print this, exit with 1.
            exit_code = error.code if isinstance(error.code, int) else 1
            is_user_error = isinstance(error.code, str)
        elif type(code := getattr(error, "exit_code", None)) is int:
            exit_code, is_user_error = code or 1, True
        elif (refused := refusal(error)) is not None:
            exit_code, is_user_error = refused.exit_code, True
        kind = FailureKind.PEER if is_peer_error(error) else FailureKind.ERROR
        type_name = type(error).__name__
        message = describe_error(error)
        return cls(
            rank=rank,
            kind=FailureKind.STOPPED if exit_code == os.EX_TEMPFAIL else kind,
            message=message if is_user_error else f"rank {rank} failed with {type_name}: {message}",
            exit_code=exit_code,
            traceback="".join(traceback.format_exception(error)),
            is_user_error=is_user_error,
        )

    def shortened(self, num_bytes: int) -> RankFailure:
        """The failure with the beginning of its message and the end of its traceback, each `num_bytes` long at most."""
        message, trace = self.message.encode(errors="replace"), self.traceback.encode(errors="replace")
        return replace(
            self,
            message=message[:num_bytes].decode(errors="ignore"),
            traceback=trace[-num_bytes:].decode(errors="ignore"),
        )

    @classmethod
    def from_exitcode(cls, rank: int, exitcode: int) -> RankFailure:
        """Describe a rank that left no report. An `exitcode` below zero is the signal that killed it."""
        if exitcode == os.EX_TEMPFAIL:
            message = (
                f"rank {rank} ended itself (exit code {exitcode}): start again to go on from the newest checkpoint"
            )
            return cls(rank, FailureKind.STOPPED, message, exit_code=exitcode)
        if exitcode >= 0:
            message = f"rank {rank} exited with code {exitcode} before it returned a result"
            return cls(rank, FailureKind.ERROR, message, exit_code=exitcode or 1)
        number = -exitcode
        kinds: dict[int, FailureKind] = {signal.SIGABRT: FailureKind.ABORTED, signal.SIGTERM: FailureKind.TERMINATED}
        message = f"rank {rank} was killed by {signal_name(number)}{_SIGNAL_HINTS.get(number, '')}"
        return cls(rank, kinds.get(number, FailureKind.ERROR), message)


def is_peer_error(error: BaseException) -> bool:
    """Tell whether an exception, or one it was raised from, says no more than that another rank is gone."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, ConnectionError | DistError):
            return True
        if isinstance(link, RuntimeError) and says_peer_is_gone(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def first_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """Pick the failure to report: of the class that explains most, the earliest. There must be one."""
    return min(failures, key=lambda failure: (failure.kind, failure.at_s))


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGTERM."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


# The arguments of these errors are all that they hold, so that they can be pickled.
class LaunchError(RuntimeError):
    """Base of the ways in which local ranks fail together. `str()` is the whole text for the screen."""

    exit_code = 1


class RankError(LaunchError):
    """A rank failed and the others were taken down."""

    def __init__(self, failure: RankFailure, log_tail: str = "") -> None:
        """`log_tail` is the end of what the rank printed, where that is not on the screen already."""
        super().__init__(failure, log_tail)
        self.failure = failure
        self.exit_code = failure.exit_code
        self.log_tail = log_tail

    def __str__(self) -> str:
        failure, text = self.failure, self.failure.message
        if failure.is_user_error:
            return text
        if self.log_tail:
            text += f"\n\nlast lines of rank {failure.rank}:\n{self.log_tail}"
        if failure.traceback:
            text += f"\n\ntraceback of rank {failure.rank}:\n{failure.traceback.rstrip()}"
        return text


class RanksInterrupted(LaunchError):
    """A signal ended the ranks before they could stop in order: nothing was saved on its account."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number

    def __str__(self) -> str:
        return f"the ranks were ended by {signal_name(self.number)}"
