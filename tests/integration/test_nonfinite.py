"""Steps without a finite gradient change nothing and are counted; too many in a row end the run, and its checkpoint
stays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from commands import Megamem, checkpoint, last_step, rows

import pretrain.checkpoint.folder as folders
from parallel.processes.launch import RankError
from pretrain.checkpoint.newest import newest_complete
from pretrain.config.stages import load_config
from pretrain.engine.session import session
from pretrain.run.folder import RunFolder
from pretrain.train.callback import Callback, Row
from pretrain.train.callbacks import default_callbacks
from pretrain.train.loop import train
from pretrain.train.run import Run, open_run
from tests.deadline import launch_within

FOUR = ("parallel.tensor=2", "parallel.pipeline=2", "checkpoint.every_steps=3")


class Poison(Callback):
    """Puts a step's value into one gradient of the second rank before the optimizer reads it; notes which steps changed
    no state.
    """

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = values
        self._last: list[torch.Tensor] = []
        self.unchanged: list[int] = []

    def on_start(self, run: Run) -> None:
        prepare_grads = run.optimizer.prepare_grads

        def poisoned() -> bool:
            value = self._values.get(run.state.step + 1)
            if value is not None and run.groups.rank == 1:
                next(run.chunks[0].parameters()).main_grad.view(-1)[3] = value
            found: bool = prepare_grads()
            return found

        run.optimizer.prepare_grads = poisoned

    def on_step(self, run: Run, row: Row) -> None:
        run.complete_weights()
        state = [p.detach().clone() for chunk in run.chunks for p in chunk.parameters()]
        for part in run.optimizer.chained_optimizers:
            for moments in part.optimizer.state.values():
                state += [moments[name].clone() for name in ("step", "exp_avg", "exp_avg_sq")]
        if len(state) == len(self._last) and all(map(torch.equal, state, self._last)):
            self.unchanged.append(run.state.step)
        self._last = state


def train_with(config_file: Path, path: Path, poison: Poison, *overrides: str) -> list[list[int]]:
    config = load_config(config_file, [*FOUR, *overrides])

    def main() -> list[int]:
        with session(config) as groups:
            run = open_run(config, RunFolder(path), groups)
            train(run, [*default_callbacks(run), poison])
            return poison.unchanged

    return launch_within(main, 4, timeout_s=240, log_dir=path / "logs")


def test_a_step_without_finite_gradients_changes_nothing(config_file: Path, tmp_path: Path, warm: None) -> None:
    run = tmp_path / "run"
    unchanged = train_with(config_file, run, Poison({4: math.nan, 6: math.inf}), "train.num_steps=8")
    assert unchanged == [[4, 6]] * 4
    found = [row for row in rows(run) if "loss" in row]
    assert [row["step"] for row in found] == list(range(1, 9))
    assert [row["num_skipped"] for row in found] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [row["step"] for row in found if row["grad_norm"] is None] == [4, 6]
    assert all(math.isfinite(row["loss"]) for row in found)
    state = folders.read_state(checkpoint(run, 8)).run
    assert (state.num_updates, state.num_skipped, state.num_skipped_in_row) == (6, 2, 0)


def test_too_many_in_a_row_end_the_run(config_file: Path, tmp_path: Path, megamem: Megamem) -> None:
    run = tmp_path / "run"
    with pytest.raises(RankError, match=r"last 2 steps had no finite gradient.* at step 5") as failure:
        train_with(
            config_file,
            run,
            Poison(dict.fromkeys(range(4, 10), math.nan)),
            "train.max_skipped_steps=2",
            "train.num_steps=9",
        )
    assert failure.value.failure.is_user_error
    # One parameter is named, where it was planted.
    assert re.search(
        r"not finite are gradients on rank 1 \(\S+, stage 0\): \S+\.weight \(1 of \d+ parameters\)", str(failure.value)
    )
    assert failure.value.exit_code == 1
    assert last_step(run) == 5
    saved, problems = newest_complete(run / "checkpoints")
    assert saved is not None
    assert (saved.step, problems) == (3, [])
    assert saved.run.num_skipped == 0
    result = megamem("train", config_file, *FOUR, "--run-dir", run, "train.num_steps=6")
    assert result.code == 0, result.output
    assert last_step(run) == 6
