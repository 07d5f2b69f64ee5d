"""Runs that meet spikes: their updates are skipped, or they go back to a checkpoint and on with other data.

A spike is planted at a place in the data: a gradient norm a million times too large where the samples from some number
on are read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import assert_same_tensors, checkpoint, evaluations, steps

from parallel.processes.launch import RankError
from pretrain.checkpoint.folder import read_state, sealed
from pretrain.config.stages import load_stages
from pretrain.engine.gradient_norms import GradientNorms
from pretrain.engine.session import session
from pretrain.errors import StoppedEarly
from pretrain.run.folder import RunFolder
from pretrain.run.history import Incident, read_history
from pretrain.train.callback import Callback, Row
from pretrain.train.callbacks import default_callbacks
from pretrain.train.loop import StopRequest, train
from pretrain.train.run import Run, owning
from pretrain.train.stage_loop import train_stages
from tests.deadline import launch_within
from tests.rotation import in_turn

RULE = ("health.spikes.window_steps=2", "health.spikes.grad_norm_deviations=300", "health.spikes.loss_deviations=null")
REWIND = ("health.spikes.action=rewind", *RULE)
STAGED = ("checkpoint.every_steps=4", "checkpoint.keep_last=0", "logging.memory_every_steps=3")
RUN = ("train.num_steps=10", *STAGED)


class Spikes(Callback):
    """Plants spikes where the run reads certain samples; and asks it to stop after a step, once it has gone back."""

    def __init__(self, samples: Sequence[int], stop: StopRequest, stop_after: int | None) -> None:
        self._samples, self._stop, self._stop_after = samples, stop, stop_after

    def on_start(self, run: Run) -> None:
        gradient_norms = run.optimizer.gradient_norms

        def planted() -> GradientNorms:
            norms = gradient_norms()
            spike = run.state.consumed_samples in self._samples
            return replace(norms, main=1e6 * norms.main) if spike else norms

        run.optimizer.gradient_norms = planted

    def on_step(self, run: Run, row: Row) -> None:
        if run.state.num_rewinds and run.state.step == self._stop_after:
            self._stop.requested = True


def train_with(
    config_file: Path,
    path: Path,
    overrides: Sequence[str],
    samples: Sequence[int],
    stop_after: int | None = None,
    common: Sequence[str] = RUN,
) -> None:
    stages = load_stages(config_file, [*common, *overrides])
    folder = RunFolder(path)
    folder.make()

    def main() -> None:
        stop = StopRequest()
        with session(*stages) as groups, owning(folder) as owner:

            def train_one(run: Run) -> None:
                train(run, [*default_callbacks(run, owner), Spikes(samples, stop, stop_after)], stop)

            train_stages(stages, folder, groups, train_one, stop)

    launch_within(main, 2, timeout_s=240, log_dir=folder.logs)


def moved(source: Path, target: Path, step: int, first: int, end: int, num_before: int = 0) -> None:
    """Copy the checkpoint of a step into another run, as of one that passes over the samples from `first` to `end`
    without having read them; `num_before` passages are there already.
    """
    shutil.copytree(checkpoint(source, step), checkpoint(target, step))
    file = checkpoint(target, step) / "state.json"
    content = json.loads(file.read_text())
    state = content["run"]
    assert (state["consumed_samples"], len(state["passed_over"])) == (first, num_before)
    content["run"] |= {"consumed_samples": end, "passed_over": [*state["passed_over"], [first, end]], "recent": []}
    file.write_text(json.dumps(sealed(content)))


def rows_without_counts(path: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in ("num_spikes", "num_rewinds")} for row in steps(path)]


def incidents(path: Path) -> list[Incident]:
    return [event for event in read_history(RunFolder(path)) if isinstance(event, Incident)]


@pytest.fixture(scope="module")
def rewound(config_file: Path, tmp_path_factory: pytest.TempPathFactory, warm: None) -> Path:
    """Two ranks, 8 samples a step. The seventh step, from sample 48 on, is a spike; so is what comes two steps later."""
    path = tmp_path_factory.mktemp("rewound") / "run"
    train_with(config_file, path, REWIND, (48, 64))
    return path


def test_a_run_that_goes_back_is_the_one_that_never_read_the_data(
    rewound: Path, config_file: Path, tmp_path: Path
) -> None:
    """The oracle goes on from the same checkpoint, whose place in the data was moved, without a rule."""
    state = read_state(checkpoint(rewound, 10)).run
    assert state.passed_over == ((32, 72),)
    assert (state.consumed_samples, state.consumed_tokens) == (72 + 6 * 8, 10 * 8 * 32)
    assert (state.num_updates, state.num_skipped, state.num_spikes, state.num_rewinds) == (10, 0, 2, 2)
    moved(rewound, tmp_path, 4, 32, 72)
    train_with(config_file, tmp_path, (), ())
    assert_same_tensors(checkpoint(rewound, 10), checkpoint(tmp_path, 10))
    assert rows_without_counts(rewound)[4:] == steps(tmp_path)
    assert evaluations(rewound) == evaluations(tmp_path)


def test_what_a_run_says_of_its_rewinds(rewound: Path) -> None:
    assert [row["step"] for row in steps(rewound)] == list(range(1, 11))
    assert [row["num_rewinds"] for row in steps(rewound)] == [0] * 4 + [2] * 6
    # A memory may drop out of so small a model, too.
    found = [event for event in incidents(rewound) if event.kind in ("spike", "rewind")]
    spike, first, _, second = found
    # The second one is two steps after the checkpoint.
    assert [(event.step, event.kind) for event in found] == [
        (step, kind) for step in (7, 6) for kind in ("spike", "rewind")
    ]
    assert "went back to the checkpoint of step 4, and passed over samples 32 to 56 (rewind 1 of 5)" in first.message
    assert "gradient norm" in spike.message
    assert "passed over samples 32 to 72 (rewind 2 of 5)" in second.message


@in_turn(1)
def test_a_run_that_went_back_and_was_stopped_goes_on_as_if_it_had_not_been(
    rewound: Path, config_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(RankError) as stopped:
        train_with(config_file, tmp_path, REWIND, (48, 64), stop_after=6)
    assert stopped.value.exit_code == StoppedEarly.exit_code
    assert read_state(checkpoint(tmp_path, 7)).run.num_rewinds == 2
    train_with(config_file, tmp_path, REWIND, (48, 64))
    assert read_state(checkpoint(tmp_path, 10)).run == read_state(checkpoint(rewound, 10)).run
    assert_same_tensors(checkpoint(tmp_path, 10), checkpoint(rewound, 10))
    assert steps(tmp_path) == steps(rewound)


def test_a_run_that_has_gone_back_often_enough_ends(config_file: Path, tmp_path: Path, warm: None) -> None:
    with pytest.raises(RankError, match=r"step 6 is a spike .* back 1 times already .*max_rewinds = 1") as failure:
        train_with(config_file, tmp_path, (*REWIND, "health.spikes.max_rewinds=1"), (48, 64))
    assert failure.value.exit_code == 1
    assert [int(path.name.removeprefix("step_")) for path in (tmp_path / "checkpoints").iterdir()] == [4]


def test_a_spike_is_skipped_as_if_its_gradient_were_not_finite(config_file: Path, tmp_path: Path, warm: None) -> None:
    """A spike before the first checkpoint is skipped too, where a run would otherwise go back."""
    for name, rule in (("skip", "health.spikes.action=skip"), ("early", "health.spikes.action=rewind")):
        train_with(config_file, tmp_path / name, (rule, *RULE, "checkpoint.every_steps=8"), (48,))
        state = read_state(checkpoint(tmp_path / name, 10)).run
        assert (state.num_updates, state.num_skipped, state.num_spikes, state.num_rewinds) == (9, 1, 1, 0)
        (incident,) = incidents(tmp_path / name)
        assert (incident.step, incident.kind) == (7, "spike")
        assert incident.message.endswith("; its update was not applied")
        assert [row["num_spikes"] for row in steps(tmp_path / name)] == [0] * 6 + [1] * 4


@in_turn(0)
def test_a_run_of_stages_goes_back_to_where_a_stage_began_and_no_further(
    config_file: Path, tmp_path: Path, warm: None
) -> None:
    """The second stage, of twice the length and half the sequences, meets a spike in its second step; the third, on
    other data and with another rate, in its first. Skipped samples count in the stages that follow.
    """
    stages = [
        {"name": "first", "num_steps": 5},
        {
            "name": "second",
            "num_steps": 4,
            "train": {"sequence_length": 64, "global_batch_size": 4, "micro_batch_size": 2},
        },
        {"name": "third", "num_steps": 3, "optimizer": {"lr": 1e-3}},
    ]
    file = tmp_path / "staged.yaml"
    content = yaml.safe_load(config_file.read_text())
    del content["train"]["num_steps"]
    file.write_text(yaml.safe_dump({**content, "stages": stages}))
    run = tmp_path / "run"
    # 5 x 8 and 4 sequences until the first spike; 8, two passed over, and 4 x 4 of the second stage until the other.
    train_with(file, run, REWIND, (44, 64), common=STAGED)
    assert [(event.step, event.message.split(", and ")[0]) for event in incidents(run) if event.kind == "rewind"] == [
        (7, "went back to the checkpoint of step 5"),
        (10, "went back to the checkpoint of step 9"),
    ]
    state = read_state(checkpoint(run, 12)).run
    assert state.passed_over == ((40, 48), (64, 72))
    assert (state.consumed_samples, state.consumed_tokens) == (72 + 3 * 8, 12 * 8 * 32)
    assert [row["step"] for row in steps(run)] == list(range(1, 13))

    second, third = tmp_path / "second", tmp_path / "third"
    moved(run, second, 5, 40, 48)
    moved(run, third, 9, 64, 72, num_before=1)
    for path in (second, third):
        train_with(file, path, (), (), common=STAGED)
    assert_same_tensors(checkpoint(second, 9), checkpoint(run, 9))
    assert_same_tensors(checkpoint(third, 12), checkpoint(run, 12))
    assert rows_without_counts(run)[5:9] == steps(second)[:4]
    assert rows_without_counts(run)[9:] == steps(third)
