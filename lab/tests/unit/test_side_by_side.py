"""Jobs that run at once: how many, where, what they leave on their screens, and what ends them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.studies.compare.runs import RunStopped
from lab.studies.compare.side_by_side import Job, core_shares, run_side_by_side, show_gpus
from pretrain.errors import DataError

PATIENCE_S = 60.0


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(name: str, work: Callable[[], object], num_steps: int = 0) -> Job:
        return Job(name, tmp_path / name / "screen.log", work, num_steps)

    return make


def wait_for(path: Path) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < give_up_s, f"{path} did not come"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "shares"),
    [
        (1, [{0, 1, 4, 5, 6}]),
        (2, [{0, 1}, {4, 5, 6}]),
        (5, [{0}, {1}, {4}, {5}, {6}]),
        (6, [{0}, {1}, {4}, {5}, {6}, {0}]),
    ],
)
def test_shares_of_cores_are_even(monkeypatch: pytest.MonkeyPatch, number: int, shares: list[set[int]]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5, 6})
    assert core_shares(number) == shares


@pytest.mark.parametrize(
    ("visible", "first", "number", "shown"),
    [
        ("0,1,2,3", 0, 1, "0"),
        ("0,1,2,3", 2, 2, "2,3"),
        ("4,5,6", 2, 2, "6,4"),
        ("4,5,6", 7, 1, "5"),
        ("4,5,6", 1, 3, "4,5,6"),
        ("GPU-a,GPU-b", 1, 1, "GPU-b"),
    ],
)
def test_gpus_are_shown_in_turn(
    monkeypatch: pytest.MonkeyPatch, visible: str, first: int, number: int, shown: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    show_gpus(first, number)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown


def test_gpus_of_a_machine_are_shown_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("parallel.machine.devices._num_gpus", lambda: 4)
    show_gpus(3, 2)
    assert os.environ.pop("CUDA_VISIBLE_DEVICES") == "3,0"


def test_as_many_run_at_once_as_may(
    tmp_path: Path, job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first two end only once both have begun; the third starts when one of them has ended."""

    def meet(own: str, other: str) -> None:
        (tmp_path / own).touch()
        wait_for(tmp_path / other)
        print("met", other)

    def last() -> None:
        assert (tmp_path / "a").exists()
        print(sorted(os.sched_getaffinity(0)))

    jobs = [
        job("one", lambda: meet("a", "b")),
        job("two", lambda: meet("b", "a")),
        job("three", last),
    ]
    run_side_by_side(jobs, 2, 1)
    assert jobs[0].screen.read_text() == "met b\n"
    assert jobs[1].screen.read_text() == "met a\n"
    assert jobs[2].screen.read_text().strip() in [str(sorted(share)) for share in core_shares(2)]
    said = capsys.readouterr().out
    assert "job 3 of 3: three: started" in said
    assert "3 of 3 done" in said


def test_the_time_that_others_take_is_told_by_their_steps(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour per look at the clock: once at the beginning, once as each job starts and once as it ends."""
    clock = iter(range(0, 3600 * 100, 3600))
    monkeypatch.setattr("lab.studies.compare.side_by_side.time.monotonic", lambda: next(clock))
    steps = {"looks": 0, "short": 100, "long": 300}
    run_side_by_side([job(name, lambda: None, of_it) for name, of_it in steps.items()], 1, 1)
    told = [line for line in capsys.readouterr().out.splitlines() if "done" in line]
    assert told == [
        "1 of 3 done: looks, in 60.0 min; time not known yet for the others",
        "2 of 3 done: short, in 60.0 min; about 720 min for the others",
        "3 of 3 done: long, in 60.0 min",
    ]


def test_a_failure_stops_the_others_and_is_shown(
    tmp_path: Path, job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    def wait_until_stopped() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        (tmp_path / "waits").touch()
        time.sleep(PATIENCE_S)
        (tmp_path / "was not stopped").touch()

    def fail() -> None:
        wait_for(tmp_path / "waits")
        raise DataError("there is no text")

    jobs = [job("waits", wait_until_stopped), job("fails", fail), job("never", lambda: (tmp_path / "never").touch())]
    with pytest.raises(RunStopped) as stopped:
        run_side_by_side(jobs, 2, 1)
    assert stopped.value.exit_code == DataError.exit_code
    assert not (tmp_path / "was not stopped").exists()
    assert not jobs[2].screen.exists()
    assert "megamem: error: there is no text" in capsys.readouterr().out


def test_a_killed_job_has_the_code_of_its_signal(job: Callable[..., Job]) -> None:
    with pytest.raises(RunStopped) as stopped:
        run_side_by_side([job("killed", lambda: os.kill(os.getpid(), signal.SIGKILL))], 2, 1)
    assert stopped.value.exit_code == 128 + signal.SIGKILL


def test_a_stop_signal_reaches_who_runs_and_starts_nobody(tmp_path: Path, job: Callable[..., Job]) -> None:
    parent = os.getpid()

    def ask_and_wait() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        os.kill(parent, signal.SIGTERM)
        time.sleep(PATIENCE_S)

    before = signal.getsignal(signal.SIGTERM)
    jobs = [job("asks", ask_and_wait), job("never", lambda: None)]
    with pytest.raises(RunStopped) as stopped:
        run_side_by_side(jobs, 1, 1)
    assert stopped.value.exit_code == 75
    assert not jobs[1].screen.exists()
    assert signal.getsignal(signal.SIGTERM) == before
