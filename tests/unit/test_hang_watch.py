"""The watch of one rank, without other ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from parallel.processes.hang_watch import HangWatch
from parallel.processes.rank_errors import FailureKind, RankFailure


class Ends:
    """Stands in for the end of the process."""

    def __init__(self) -> None:
        self.words, self.exit_code = "", 0
        self.come = threading.Event()

    def __call__(self, words: str, exit_code: int) -> None:
        self.words, self.exit_code = words, exit_code
        self.come.set()


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watch for hangs"]


def test_what_does_not_come_ends_the_rank_with_its_stacks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ends, stacks = Ends(), tmp_path / "logs" / "stacks.txt"
    watch = HangWatch(stacks, 3, verdict=lambda: ("Go on.", 75), grace_s=0.0, end=ends)
    # A step due earlier takes the place of one due late.
    watch.expect("the first step", 3600.0)
    watch.expect("step 17", 0.0)

    def stand_here() -> bool:
        return ends.come.wait(60)

    assert stand_here()
    assert ends.exit_code == 75
    assert ends.words.startswith("rank 3 on ")
    assert f"step 17 has taken over 0 min; its stacks are in {stacks}. Go on." in ends.words
    written = stacks.read_text()
    assert "step 17 has taken over" in written
    # The stacks are those of all threads, the one that hangs included.
    assert "stand_here" in written
    assert str(stacks) in capfd.readouterr().err


def test_stacks_that_cannot_be_written_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file")
    ends = Ends()
    watch = HangWatch(tmp_path / "logs" / "stacks.txt", 0, verdict=lambda: ("Look.", 1), grace_s=0.0, end=ends)
    watch.expect("step 1", 0.0)
    assert ends.come.wait(60)
    assert "could not be written" in ends.words
    assert ends.exit_code == 1


def test_what_comes_in_time_or_is_not_awaited_any_more_ends_nothing(tmp_path: Path) -> None:
    before, ends = watches(), Ends()
    watch = HangWatch(tmp_path / "stacks.txt", 0, verdict=lambda: ("", 1), grace_s=0.0, end=ends)
    watch.expect("a", 3600)
    watch.expect("b", 1800)
    # One thread, whatever is awaited.
    assert len(watches()) == len(before) + 1
    watch.stop()
    assert watches() == before
    watch.stop()
    assert not ends.come.is_set()
    assert not (tmp_path / "stacks.txt").exists()


def test_a_rank_that_ended_itself_to_be_started_again_is_no_defect() -> None:
    failure = RankFailure.from_exitcode(2, 75)
    assert (failure.kind, failure.exit_code) == (FailureKind.STOPPED, 75)
    assert "start again" in failure.message
