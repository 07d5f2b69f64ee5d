"""Among several failures the one that explains the others is reported, and reported in the right form."""

from __future__ import annotations

import os
import pickle
import signal
from dataclasses import replace

import pytest

from parallel.processes.rank_errors import (
    FailureKind,
    LaunchError,
    RankError,
    RankFailure,
    RanksInterrupted,
    first_cause,
)
from pretrain.errors import CheckpointError, DataError, StoppedEarly


def failure(error: BaseException, *, rank: int = 0, at_s: float = 0.0) -> RankFailure:
    try:
        raise error
    except BaseException as caught:
        return replace(RankFailure.from_exception(rank, caught), at_s=at_s)


def wrapped(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


GLOO_LOST = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2"
)


@pytest.mark.parametrize(
    ("error", "kind", "exit_code", "is_user_error"),
    [
        (KeyError("x"), FailureKind.ERROR, 1, False),
        (RuntimeError("shapes differ"), FailureKind.ERROR, 1, False),
        (DataError("no such corpus"), FailureKind.ERROR, 3, True),
        (StoppedEarly("saved"), FailureKind.STOPPED, 75, True),
        (SystemExit(16), FailureKind.ERROR, 16, False),
        (SystemExit("give me a corpus"), FailureKind.ERROR, 1, True),
        (KeyboardInterrupt(), FailureKind.ERROR, 1, False),
        (GLOO_LOST, FailureKind.PEER, 1, False),
        (ConnectionResetError("peer"), FailureKind.PEER, 1, False),
        (wrapped(CheckpointError("cannot save"), GLOO_LOST), FailureKind.PEER, 4, True),
    ],
)
def test_exceptions_are_classed(error: BaseException, kind: FailureKind, exit_code: int, is_user_error: bool) -> None:
    found = failure(error)
    assert (found.kind, found.exit_code, found.is_user_error) == (kind, exit_code, is_user_error)


def test_an_exit_code_that_is_no_integer_is_not_a_users_error() -> None:
    error = RuntimeError("x")
    error.exit_code = True  # type: ignore[attr-defined]
    assert not failure(error).is_user_error


ERROR_LATE = failure(ValueError("bad"), rank=3, at_s=9.0)
ERROR_EARLY = failure(ValueError("bad"), rank=2, at_s=2.0)
PEER_FIRST = failure(GLOO_LOST, rank=0, at_s=1.0)
STOPPED = failure(StoppedEarly("saved"), rank=1, at_s=1.5)
KILLED = replace(RankFailure.from_exitcode(5, -signal.SIGKILL), at_s=4.0)
ABORTED = replace(RankFailure.from_exitcode(4, -signal.SIGABRT), at_s=0.5)
TERMINATED = replace(RankFailure.from_exitcode(6, -signal.SIGTERM), at_s=0.2)


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([PEER_FIRST, ERROR_LATE], ERROR_LATE),
        ([ERROR_LATE, ERROR_EARLY], ERROR_EARLY),
        ([PEER_FIRST, KILLED, ERROR_LATE], KILLED),
        ([ABORTED, KILLED], KILLED),
        ([ABORTED, PEER_FIRST], ABORTED),
        ([STOPPED, PEER_FIRST], STOPPED),
        ([STOPPED, ERROR_LATE], ERROR_LATE),
        ([TERMINATED, STOPPED], STOPPED),
        ([TERMINATED, ABORTED], ABORTED),
        ([PEER_FIRST, TERMINATED], TERMINATED),
        ([PEER_FIRST], PEER_FIRST),
    ],
)
def test_first_cause(failures: list[RankFailure], cause: RankFailure) -> None:
    assert first_cause(failures) is cause
    assert first_cause(reversed(failures)) is cause


def test_a_defect_ends_with_its_traceback() -> None:
    text = str(RankError(ERROR_LATE, log_tail="step 7"))
    assert text.startswith("rank 3 failed with ValueError: bad")
    assert "step 7" in text
    assert text.endswith("ValueError: bad")
    assert "Traceback (most recent call last)" in text


def test_a_users_error_is_its_message_alone() -> None:
    error = RankError(failure(DataError("corpus.jsonl line 3: no field 'text'")), log_tail="step 7")
    assert str(error) == "corpus.jsonl line 3: no field 'text'"
    assert error.exit_code == 3


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, "SIGKILL (out of memory?)"),
        (signal.SIGSEGV, "SIGSEGV"),
        (signal.SIGTERM, "SIGTERM"),
        (40, "signal 40"),
    ],
)
def test_a_killed_rank_says_by_which_signal(number: int, text: str) -> None:
    error = RankError(RankFailure.from_exitcode(2, -number))
    assert f"rank 2 was killed by {text}" in str(error)
    assert error.exit_code == 1


@pytest.mark.parametrize(
    ("code", "exit_code", "kind"),
    [(5, 5, FailureKind.ERROR), (0, 1, FailureKind.ERROR), (75, 75, FailureKind.STOPPED)],
)
def test_a_rank_that_left_without_a_result_is_a_failure(code: int, exit_code: int, kind: FailureKind) -> None:
    failure = RankFailure.from_exitcode(3, code)
    assert (failure.rank, failure.kind) == (3, kind)
    assert RankError(failure).exit_code == exit_code


def test_exit_codes_of_interruption_follow_the_shell() -> None:
    assert RanksInterrupted(signal.SIGTERM).exit_code == 143
    assert RanksInterrupted(signal.SIGINT).exit_code == 130


@pytest.mark.parametrize("error", [RankError(KILLED, "step 7"), RanksInterrupted(15)])
def test_errors_come_through_a_pickle(error: LaunchError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.exit_code) == (type(error), str(error), error.exit_code)


def test_the_code_for_try_again_is_the_one_the_errors_use() -> None:
    assert StoppedEarly.exit_code == os.EX_TEMPFAIL
