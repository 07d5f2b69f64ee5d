"""A run folder has one owner at a time, wherever its processes run."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import pretrain.run.owner as owner_module
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.owner import Owner, owned

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "mine")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "BEAT_S", 0.02)
    monkeypatch.setattr(owner_module, "LAPSE_S", 1.0)


def own_until_told(folder: RunFolder, pipe: Connection) -> None:
    with owned(folder):
        pipe.send(None)
        pipe.recv()


@pytest.fixture
def other_process(folder: RunFolder) -> Iterator[Any]:
    """A process that owns the folder."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=own_until_told, args=(folder, there))
    process.start()
    here.recv()
    yield process
    process.kill()
    process.join()


def claim_file(folder: RunFolder) -> Path:
    """The one file of claims that there is."""
    (path,) = folder.owner.iterdir()
    return path


def leave_claim(folder: RunFolder, **changes: Any) -> None:
    """The claim of an owner that does not beat."""
    with owned(folder):
        fields = json.loads(claim_file(folder).read_bytes())
    claim_file(folder).write_text(json.dumps({**fields, **changes}))


def test_a_claim_lasts_as_long_as_its_block(folder: RunFolder) -> None:
    with owned(folder) as owner:
        claim = json.loads(claim_file(folder).read_bytes())
        assert claim["pid"] == os.getpid()
        assert claim["life"].strip().isdecimal()
        owner.check()
    assert json.loads(claim_file(folder).read_bytes()) == {**claim, "life": "       ended"}
    with owned(folder):
        assert json.loads(claim_file(folder).read_bytes())["token"] != claim["token"]


def test_an_error_ends_the_claim_too(folder: RunFolder) -> None:
    with pytest.raises(ZeroDivisionError), owned(folder):
        1 / 0  # noqa: B018
    assert b"ended" in claim_file(folder).read_bytes()


def test_the_second_is_told_who_the_first_is(folder: RunFolder, other_process: Any) -> None:
    with pytest.raises(ConfigError, match=rf"mine is in use by process {other_process.pid} on .* another --run-dir"):
        owned(folder).__enter__()
    assert json.loads(claim_file(folder).read_bytes())["pid"] == other_process.pid


def test_a_killed_owner_holds_nobody_up(
    folder: RunFolder, other_process: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(owner_module, "LAPSE_S", 1000.0)
    # Not waited for: what is left is a zombie, which still has its number.
    os.kill(other_process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other_process.pid, os.WEXITED | os.WNOWAIT)
    with owned(folder) as owner:
        owner.check()
    assert capsys.readouterr().out == ""


def test_a_number_that_another_process_has_now_is_no_owner(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "LAPSE_S", 1000.0)
    leave_claim(folder, started=1)
    with owned(folder) as owner:
        owner.check()


@pytest.mark.parametrize("machine", ["another kernel", ""])
def test_an_owner_out_of_sight_is_dead_when_it_does_not_beat(
    folder: RunFolder, machine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(owner_module, "LAPSE_S", 0.2)
    leave_claim(folder, machine=machine, host="node7")
    with owned(folder) as owner:
        owner.check()
    said = capsys.readouterr().out
    assert "node7" in said
    assert "watching for up to 0 s" in said


def test_an_owner_out_of_sight_is_alive_when_it_beats(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    here = owner_module._machine
    monkeypatch.setattr(owner_module, "_machine", lambda: "another kernel")
    with owned(folder) as owner:
        monkeypatch.setattr(owner_module, "_machine", here)
        with pytest.raises(ConfigError, match="is in use by process"):
            owned(folder).__enter__()
        owner.check()


def test_what_is_no_claim_is_watched_like_one(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "LAPSE_S", 0.2)
    folder.owner.mkdir(parents=True)
    (folder.owner / "000001.json").write_text("{")
    with owned(folder) as owner:
        owner.check()


def test_slurm_starts_a_job_again_when_it_has_ended(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "LAPSE_S", 1000.0)
    leave_claim(folder, machine="another kernel", job="77", attempt=0)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with owned(folder) as owner:
        owner.check()
        with pytest.raises(ConfigError, match="Slurm job 77"):
            owned(folder).__enter__()


def test_who_was_taken_for_dead_stops_before_it_writes(folder: RunFolder) -> None:
    with ExitStack() as second_block:
        with owned(folder) as first:
            claim_file(folder).unlink()
            with pytest.raises(ConfigError, match="no longer belongs to this run: somebody removed"):
                first.check()
            second = second_block.enter_context(owned(folder))
            with pytest.raises(ConfigError, match=f"no longer belongs to this run: process {os.getpid()} on .* owns"):
                first.check()
        # Neither the first's beats nor its end have touched the claim of the second.
        second.check()


@pytest.mark.parametrize("attempt", range(20))
def test_of_many_that_find_a_dead_owner_one_wins(folder: RunFolder, attempt: int) -> None:
    """Threads that start together, as processes would."""
    leave_claim(folder, started=1)
    together, all_have_tried = threading.Barrier(8), threading.Barrier(8)
    won: list[Owner] = []
    lost: list[ConfigError] = []

    def contend() -> None:
        together.wait()
        try:
            with owned(folder) as owner:
                won.append(owner)
                all_have_tried.wait(60)
                owner.check()
        except ConfigError as error:
            lost.append(error)
            all_have_tried.wait(60)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert b"ended" in claim_file(folder).read_bytes()


@pytest.mark.parametrize("seed", range(5))
def test_owners_that_come_and_go_never_meet(folder: RunFolder, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens between two steps of a contender: each waits for a random while before it."""
    dice = random.Random(seed)

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            time.sleep(dice.choice([0, 0, 0.0005, 0.003]))
            return function(*arguments)

        return call

    for name in ("_numbered", "_read", "_put_down"):
        monkeypatch.setattr(owner_module, name, late(getattr(owner_module, name)))
    inside = threading.Lock()
    wins: list[int] = []
    met: list[int] = []

    def come_and_go(number: int) -> None:
        for _ in range(25):
            try:
                with owned(folder) as owner:
                    if not inside.acquire(blocking=False):
                        met.append(number)
                        continue
                    owner.check()
                    wins.append(number)
                    inside.release()
            except ConfigError as error:
                if "is in use" not in str(error):
                    met.append(number)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met
    assert wins


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the run folder .*file/run cannot be written \(Not a directory\)"):
        owned(RunFolder(tmp_path / "file" / "run")).__enter__()
