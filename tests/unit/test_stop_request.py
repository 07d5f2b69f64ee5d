"""SIGTERM, SIGINT and SIGUSR1 ask a run to stop, unless the process was started with one of them ignored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pretrain.train.loop import StopRequest

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def unheeded(number: int, _: object) -> None:
    raise AssertionError(f"no one has asked for signal {number}")


@pytest.fixture(autouse=True)
def _handlers_that_fail() -> Iterator[None]:
    """Replace Python's default handlers, which would end the test process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, unheeded)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_request(number: int) -> None:
    request = StopRequest()
    assert not request.requested
    os.kill(os.getpid(), number)
    assert request.requested


def test_a_signal_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = StopRequest()
    os.kill(os.getpid(), signal.SIGINT)
    assert not request.requested
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.requested
