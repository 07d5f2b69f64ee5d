"""Saves that ranks die in, and saves that are written while training goes on."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import Megamem, Start, assert_same_tensors, checkpoint, last_step, rows, steps, wait_until

import pretrain.checkpoint.folder as folders
import pretrain.checkpoint.item_files as item_files
import pretrain.checkpoint.saver as saving
from pretrain.checkpoint.newest import damaged_files, newest_complete
from tests.rotation import in_rotation

TWO = ("--nproc", 2)
ASYNCHRONOUS = "checkpoint.asynchronous=true"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_writing() -> None:
    """Die once the ranks have agreed who writes what."""
    start = saving.FileWriters

    def killed(folder: Path, rank: int, *arguments: Any) -> Any:
        if rank == 1 and folder.name.endswith("07"):
            die()
        return start(folder, rank, *arguments)

    saving.FileWriters = killed  # type: ignore[assignment,misc]


def while_writing() -> None:
    """Die after half of a file."""
    write = item_files.write_file

    def killed(path: Path, data: Mapping[Any, Any], stop: threading.Event) -> Any:
        if path.parent.name.endswith("07") and path.name.startswith("__1_"):
            write(path, dict(list(data.items())[: len(data) // 2]), stop)
            die()
        return write(path, data, stop)

    item_files.write_file = killed


def before_the_state() -> None:
    """Die once all files of tensors and the index are there."""
    write_state = folders.write_state

    def killed(path: Path, *arguments: Any) -> None:
        if path.name.endswith("07"):
            die()
        write_state(path, *arguments)

    folders.write_state = killed  # type: ignore[assignment]


def before_the_name() -> None:
    """Die when nothing is missing but the folder's name."""
    publish = folders.publish

    def killed(path: Path, final: Path) -> None:
        if path.name.endswith("07"):
            die()
        publish(path, final)

    folders.publish = killed


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem, config_file: Path) -> Path:
    """A run of two ranks with one checkpoint. Copy it to go on."""
    path = tmp_path_factory.mktemp("five") / "run"
    result = megamem("train", config_file, *TWO, "--run-dir", path, "train.num_steps=5")
    assert result.code == 0, result.output
    return path


DEATHS = [
    pytest.param(phase, options, id=f"{phase.__name__}-{name}")
    for phase in (before_writing, while_writing, before_the_state, before_the_name)
    for name, options in (("synchronous", ()), ("asynchronous", (ASYNCHRONOUS,)))
]


@pytest.mark.parametrize(("phase", "options"), in_rotation(DEATHS))
def test_a_rank_that_dies_in_a_save_costs_that_save(
    megamem: Megamem,
    config_file: Path,
    five_steps: Path,
    tmp_path: Path,
    phase: Callable[[], None],
    options: tuple[str, ...],
) -> None:
    run = Path(shutil.copytree(five_steps, tmp_path / "run"))
    command = ("train", config_file, *TWO, "--run-dir", run, *options, "train.num_steps=9", "checkpoint.every_steps=7")
    result = megamem(*command, before=phase)
    victim = 0 if phase in (before_the_state, before_the_name) else 1
    assert result.code == 1, result.output
    assert f"rank {victim} was killed by SIGKILL" in result.output
    assert newest_complete(run / "checkpoints") == (folders.read_state(checkpoint(run, 5)), [])
    if not options:
        # An asynchronous save leaves the same behind.
        result = megamem(*command)
        assert result.code == 0, result.output
        assert f"resuming from {checkpoint(run, 5)} (step 5)" in result.output
        assert [row["step"] for row in steps(run)] == list(range(1, 10))
        assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_00000007", "step_00000009"]
        assert damaged_files(checkpoint(run, 7)) == []


def wait_for_the_steps_after(run: Path) -> Callable[[], None]:
    """Checkpoints of step 3 and 6 are not written before two more steps were taken."""

    def patch() -> None:
        write = item_files.write_file

        def held_up(path: Path, *arguments: Any) -> Any:
            step = int(path.parent.name[-8:])
            if step in (3, 6):
                wait_until(lambda: last_step(run) >= step + 2, f"step {step + 2}")
            return write(path, *arguments)

        item_files.write_file = held_up  # type: ignore[assignment]

    return patch


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    megamem: Megamem, config_file: Path, tmp_path: Path
) -> None:
    options = (
        "train.num_steps=10",
        "checkpoint.every_steps=3",
        "checkpoint.keep_last=0",
        "train.precision=bf16",
    )
    result = megamem("train", config_file, *TWO, "--run-dir", tmp_path / "sync", *options)
    assert result.code == 0, result.output
    run = tmp_path / "async"
    before = wait_for_the_steps_after(run)
    result = megamem("train", config_file, *TWO, "--run-dir", run, *options, ASYNCHRONOUS, before=before)
    assert result.code == 0, result.output
    assert steps(run) == steps(tmp_path / "sync")
    for step in (3, 6, 9, 10):
        assert_same_tensors(checkpoint(run, step), checkpoint(tmp_path / "sync", step))
        assert damaged_files(checkpoint(run, step)) == []
    told = rows(run)
    for step in (3, 6, 9, 10):
        (row,) = (row for row in told if "save_s" in row and row["step"] == step)
        assert 0 < row["save_stall_s"] <= row["save_s"]
        files = [file.stat().st_size for file in checkpoint(run, step).iterdir() if file.name != folders.STATE_FILE]
        assert row["save_bytes"] == sum(files)
        assert f"saved step {step}: stalled " in result.output
    # Two steps were taken before it was complete.
    order = [(row["step"], "save_s" in row) for row in told]
    assert order.index((3, True)) > order.index((5, False))
    # And it goes on from any of them.
    shutil.rmtree(checkpoint(run, 10))
    shutil.rmtree(checkpoint(run, 9))
    result = megamem("train", config_file, "--nproc", 2, "--run-dir", run, *options)
    assert result.code == 0, result.output
    assert "(step 6)" in result.output
    assert steps(run) == steps(tmp_path / "sync")
    assert_same_tensors(checkpoint(run, 10), checkpoint(tmp_path / "sync", 10))


def test_a_run_that_is_asked_to_stop_finishes_the_save_in_flight(
    megamem: Megamem, config_file: Path, tmp_path: Path, start: Start
) -> None:
    run = tmp_path / "run"
    options = ("checkpoint.every_steps=1", "checkpoint.keep_last=0", "train.num_steps=400", ASYNCHRONOUS)
    command = start("train", config_file, *TWO, "--run-dir", run, *options)
    wait_until(lambda: last_step(run) >= 3, "step 3")
    os.kill(command.pid, signal.SIGTERM)
    result = command.wait()
    assert result.code == 75, result.output
    step = last_step(run)
    names = [path.name for path in sorted((run / "checkpoints").iterdir())]
    assert names == [checkpoint(run, number).name for number in range(1, step + 1)]
    assert not [damage for number in range(1, step + 1) for damage in damaged_files(checkpoint(run, number))]
