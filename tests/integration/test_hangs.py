"""A rank that hangs ends all of them, with their stacks and, if there is a checkpoint, the exit code to go on with."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from commands import Megamem, checkpoint, last_step

import pretrain.train.health.hangs as hangs
from parallel.processes.launch import RankError
from pretrain.config.stages import load_config
from pretrain.engine.session import session
from pretrain.run.folder import RunFolder
from pretrain.train.callback import Callback
from pretrain.train.callbacks import default_callbacks
from pretrain.train.loop import train
from pretrain.train.run import Run, open_run
from tests.deadline import launch_within

RUN = ("parallel.tensor=2", "train.num_steps=6", "health.hang_minutes=0.1")
"""Six seconds, of which a step takes a small part."""


class Hang(Callback):
    """The second rank does not come to the reduction of a step's gradient norms."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_start(self, run: Run) -> None:
        gradient_norms = run.optimizer.gradient_norms

        def wait_for_ever() -> Any:
            if run.groups.rank == 1 and run.state.step + 1 == self._step:
                threading.Event().wait()
            return gradient_norms()

        run.optimizer.gradient_norms = wait_for_ever


def train_until_it_hangs(config_file: Path, path: Path, *overrides: str) -> RankError:
    config, folder = load_config(config_file, [*RUN, *overrides]), RunFolder(path)

    def main() -> None:
        with session(config) as groups:
            run = open_run(config, folder, groups)
            train(run, [*default_callbacks(run), Hang(step=4)])

    with pytest.raises(RankError) as failure:
        launch_within(main, 2, timeout_s=90, log_dir=folder.logs)
    return failure.value


def test_a_hang_leaves_stacks_of_all_ranks_and_the_run_goes_on(
    config_file: Path, tmp_path: Path, megamem: Megamem, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(hangs, "GRACE_S", 3.0)
    error = train_until_it_hangs(config_file, tmp_path, "checkpoint.every_steps=2")
    assert error.exit_code == 75
    assert "start again to go on from the newest checkpoint" in str(error)
    first, second = ((tmp_path / "logs" / f"stacks_rank_{rank}.txt").read_text() for rank in (0, 1))
    for text in (first, second):
        assert "step 4 has taken over 0.1 min" in text
    # One hangs; the other one waits for it in the all-reduce.
    assert "wait_for_ever" in second
    assert "gradient_norms" in first
    assert "all_reduce" in first
    assert "rank 0 on " in capfd.readouterr().err
    assert last_step(tmp_path) == 3
    result = megamem("train", config_file, *RUN, "checkpoint.every_steps=2", "--run-dir", tmp_path)
    assert result.code == 0, result.output
    assert "resuming from" in result.output
    assert checkpoint(tmp_path, 6).is_dir()


def test_a_hang_without_a_checkpoint_is_an_error(
    config_file: Path, tmp_path: Path, warm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "GRACE_S", 3.0)
    error = train_until_it_hangs(config_file, tmp_path, "checkpoint.every_steps=0")
    assert error.exit_code == 1
    assert (tmp_path / "logs" / "stacks_rank_1.txt").exists()
