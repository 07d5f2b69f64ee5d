"""How a launch of local ranks can fail, and which of several failures is the cause.

When one rank dies the others soon fail too: their collectives break. What the user must see is the first cause, so every failure is
put in a class (`FailureKind`) and the earliest of the best class is reported.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

# Raised by collectives whose peer is gone, by type ...
_PEER_ERROR_TYPES = frozenset(
    {
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    }
)
# ... and by text, where the type is a plain RuntimeError.
_PEER_ERROR_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo/transport",
    "remote process exited",
    "nccl communicator was aborted",
)


class FailureKind(IntEnum):
    """Classes of failures: the lower, the likelier to be the cause of the others."""

    ERROR = 0
    """The rank raised, exited or was killed for a reason of its own."""
    ABORTED = 1
    """SIGABRT: a defect in native code, or NCCL's watchdog giving up on a rank that is the true cause."""
    STOPPED = 2
    """The rank stopped on request and can be started again (exit code EX_TEMPFAIL): nothing is wrong with it."""
    PEER = 3
    """The rank lost the connection to another one."""


@dataclass(frozen=True)
class Failure:
    """How one rank ended, if not with a result. Sent from the rank to its parent, so every field is plain data."""

    rank: int
    at_s: float
    """When, on the machine's monotonic clock, which all local ranks share."""
    kind: FailureKind
    message: str
    exit_code: int = 1
    """What the whole command should exit with."""
    type_name: str | None = None
    """Type of the exception, when there was one."""
    traceback: str = ""
    is_user_error: bool = False
    """The exception carried an exit code of its own: its message says all, a traceback would only hide it."""
    signal_number: int | None = None
    """The signal that killed the rank."""

    @classmethod
    def from_exception(cls, rank: int, at_s: float, error: BaseException) -> Failure:
        """Describe what a rank raised. An integer `exit_code` attribute marks a user's error, `SystemExit` keeps its code."""
        exit_code, is_user_error = 1, False
        if isinstance(error, SystemExit):
            # sys.exit("text") is Python's own way to say: print this, exit with 1.
            exit_code = error.code if isinstance(error.code, int) else 1
            is_user_error = isinstance(error.code, str)
        elif type(code := getattr(error, "exit_code", None)) is int:
            exit_code, is_user_error = code or 1, True
        kind = FailureKind.ERROR
        if exit_code == os.EX_TEMPFAIL:
            kind = FailureKind.STOPPED
        elif is_peer_error(error):
            kind = FailureKind.PEER
        return cls(
            rank=rank,
            at_s=at_s,
            kind=kind,
            message=str(error) or type(error).__name__,
            exit_code=exit_code,
            type_name=type(error).__name__,
            traceback="".join(traceback.format_exception(error)),
            is_user_error=is_user_error,
        )

    @classmethod
    def from_signal(cls, rank: int, at_s: float, number: int) -> Failure:
        """Describe a rank that a signal killed."""
        hints: dict[int, str] = {
            signal.SIGKILL: " (out of memory?)",
            signal.SIGSEGV: " (a defect in native code)",
            signal.SIGBUS: " (/dev/shm full?)",
        }
        return cls(
            rank=rank,
            at_s=at_s,
            kind=FailureKind.ABORTED if number == signal.SIGABRT else FailureKind.ERROR,
            message=f"rank {rank} was killed by {signal_name(number)}{hints.get(number, '')}",
            signal_number=number,
        )

    @classmethod
    def from_exit(cls, rank: int, at_s: float, code: int | None) -> Failure:
        """Describe a rank that went away by itself, without a result and without an exception (`os._exit`)."""
        how = "ended" if code is None else f"exited with code {code}"
        return cls(rank, at_s, FailureKind.ERROR, f"rank {rank} {how} before it returned a result", exit_code=code or 1)


def is_peer_error(error: BaseException) -> bool:
    """Tell whether an exception, or one it was raised from, says no more than that another rank is gone."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = str(link).lower()
        if type(link).__name__ in _PEER_ERROR_TYPES:
            return True
        if isinstance(link, RuntimeError) and any(phrase in text for phrase in _PEER_ERROR_TEXTS):
            return True
        link = link.__cause__ or link.__context__
    return False


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Pick the failure to report: of the class that explains most, the earliest.

    Raises:
        ValueError: there are no failures.
    """
    return min(failures, key=lambda failure: (failure.kind, failure.at_s))


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGTERM."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class LaunchError(RuntimeError):
    """Base of the ways in which local ranks fail together. `str()` is the whole text for the screen."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class RankError(LaunchError):
    """A rank failed and the others were taken down."""

    def __init__(self, failure: Failure, log_tail: str = "") -> None:
        """Build the report. `log_tail` is the end of what the rank printed, where that is not on the screen already."""
        super().__init__(_report(failure, log_tail), failure.exit_code)
        self.rank = failure.rank
        self.type_name = failure.type_name
        self.message = failure.message
        self.traceback_text = failure.traceback
        self.is_user_error = failure.is_user_error
        self.signal_number = failure.signal_number


class RankTimeout(LaunchError):
    """The ranks did not finish in time and were killed. `stacks` holds what each unfinished rank was doing."""

    def __init__(self, timeout_s: float, num_ranks: int, stacks: Mapping[int, str]) -> None:
        which = ", ".join(str(rank) for rank in stacks)
        text = [f"{len(stacks)} of {num_ranks} ranks did not finish within {timeout_s:g} s and were killed: {which}"]
        text += [f"rank {rank} stood at:\n{stack or '(no stack: it did not answer)'}" for rank, stack in stacks.items()]
        super().__init__("\n\n".join(text), 1)
        self.stacks = dict(stacks)


class RanksInterrupted(LaunchError):
    """A signal ended the ranks before they could stop in order: nothing was saved on its account."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the ranks were ended by {signal_name(number)}", 128 + number)
        self.signal_number = number


def _report(failure: Failure, log_tail: str) -> str:
    if failure.is_user_error:
        return failure.message
    if failure.type_name is None:
        headline = failure.message
    else:
        headline = f"rank {failure.rank} failed with {failure.type_name}: {failure.message}"
    parts = [headline]
    if log_tail:
        parts.append(f"last lines of rank {failure.rank}:\n{log_tail}")
    if failure.traceback:
        parts.append(f"traceback of rank {failure.rank}:\n{failure.traceback.rstrip()}")
    return "\n\n".join(parts)
