"""Progress in a file: a line per update with its time, nothing twice, and no characters that draw."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress

import pytest

import pretrain.progress as progress_module
from pretrain.progress import Progress

LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, in its only element."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\r" not in captured.err
    assert all(re.match(LINE, line) for line in captured.err.splitlines())
    return [re.sub(LINE, "", line, count=1) for line in captured.err.splitlines()]


def test_a_line_every_ten_seconds_and_at_the_end(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("step", total=40)
    for step in range(25):
        clock[0] += 1.0
        progress.update(1, f"loss {step}")
    assert lines(capsys) == [
        "step 10/40 | loss 9 | 00:10 elapsed, 00:30 left",
        "step 20/40 | loss 19 | 00:20 elapsed, 00:20 left",
    ]
    progress.say("step 25: validation loss 3")
    assert lines(capsys) == ["step 25/40 | loss 24 | 00:25 elapsed, 00:15 left", "step 25: validation loss 3"]
    progress.close()
    assert lines(capsys) == []


def test_what_was_done_before_says_nothing_of_the_speed(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", total=4_000_000, initial=2_000_000, is_bytes=True) as progress:
        clock[0] += 4000.0
        progress.update(1_000_000)
    assert lines(capsys) == ["reading 3.0 of 4.0 MB | 1:06:40 elapsed, 1:06:40 left"]


def test_short_work_need_not_be_told(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("evaluating", total=3, leave=False) as progress:
        progress.update(3)
    assert lines(capsys) == []


def read_to_the_end(terminal: int) -> Iterator[bytes]:
    """Bytes that a terminal has been given, in the portions they come in, once its other side is closed."""
    # Linux ends it with an error.
    with suppress(OSError):
        while portion := os.read(terminal, 65536):
            yield portion


def test_a_terminal_gets_a_bar_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        with Progress("step", total=2) as progress:
            progress.update(2, "loss 1.2345 grad 0.99 lr 1.00e-03 12,345 tokens/s")
    drawn = b"".join(read_to_the_end(ours)).decode()
    os.close(ours)
    assert "\r" in drawn
    assert "step 2/2" in drawn
    assert "\x1b[" not in drawn.replace("\x1b[A", ""), "no colours"
    assert max(map(len, re.split(r"[\r\n]", drawn))) <= 50
