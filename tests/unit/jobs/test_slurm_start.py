"""Start of ranks: where they meet, the code they run, and stops that are heard from the first moment."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from pretrain.errors import UserError
from pretrain.run.stop import StopRequest
from slurm import snapshot
from slurm.rendezvous import meeting_point


def test_all_ranks_meet_where_rank_0_says(tmp_path: Path) -> None:
    file = tmp_path / "rendezvous.json"
    found = []
    other = threading.Thread(target=lambda: found.append(meeting_point(file, 3, 60.0)))
    other.start()
    said = meeting_point(file, 0, 60.0, {"SLURMD_NODENAME": "localhost"})
    other.join()
    assert found == [said]
    assert said.host == "localhost"
    assert len({said.port, said.check_port, 0}) == 3


def test_a_name_that_nobody_knows_is_not_told(tmp_path: Path) -> None:
    said = meeting_point(tmp_path / "file", 0, 60.0, {"SLURMD_NODENAME": "no-such-node.invalid"})
    assert said.host != "no-such-node.invalid"


def test_a_rank_0_that_never_started_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rank 0 has not said within 0 s"):
        meeting_point(tmp_path / "file", 1, 0.0)


def test_a_snapshot_is_the_code_and_its_hash_that_of_the_contents(tmp_path: Path) -> None:
    name = snapshot.take_snapshot(tmp_path)
    copy = tmp_path / name
    assert snapshot.code_hash(copy) == snapshot.code_hash() == name
    assert (copy / "kernels" / "gather_sum" / "cpu.cpp").exists()
    assert snapshot.take_snapshot(tmp_path) == name
    assert [path.name for path in tmp_path.iterdir()] == [name]
    shutil.copytree(copy, tmp_path / "edited")
    with (tmp_path / "edited" / "tools" / "cli.py").open("a") as stream:
        stream.write("\n")
    assert snapshot.code_hash(tmp_path / "edited") != name
    (copy / "tools" / "__pycache__").mkdir()
    (copy / "tools" / "__pycache__" / "cli.pyc").touch()
    assert snapshot.code_hash(copy) == name


def test_what_an_earlier_listener_heard_counts() -> None:
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        first = StopRequest()
        assert not StopRequest(heed_earlier=True).requested
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not first.requested
        assert StopRequest(heed_earlier=True).requested
        # It speaks for itself again.
        assert not StopRequest().requested
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
