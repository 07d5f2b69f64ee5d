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

import pytest
from commands import assert_same_tensors, checkpoint, evaluations, steps

from parallel.launch import RankError
from pretrain.callbacks import Callback, Row, default_callbacks
from pretrain.checkpoint.folder import read_state, sealed
from pretrain.config.loader import load_config
from pretrain.errors import StoppedEarly
from pretrain.folder import RunFolder
from pretrain.history import Incident, read_history
from pretrain.loop import StopRequest, train
from pretrain.optimizer import GradientNorms
from pretrain.run import Run, open_run, owning
from pretrain.session import session
from tests.deadline import launch_within

RULE = ("health.spikes.window_steps=2", "health.spikes.grad_norm_deviations=300", "health.spikes.loss_deviations=null")
REWIND = ("health.spikes.action=rewind", *RULE)
RUN = ("train.num_steps=10", "checkpoint.every_steps=4", "checkpoint.keep_last=0", "logging.memory_every_steps=3")


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
    config_file: Path, path: Path, overrides: Sequence[str], samples: Sequence[int], stop_after: int | None = None
) -> None:
    config = load_config(config_file, [*RUN, *overrides])
    folder = RunFolder(path)
    folder.make()

    def main() -> None:
        stop = StopRequest()
        with session(config) as groups, owning(folder, groups) as owner:
            run = open_run(config, folder, groups)
            train(run, [*default_callbacks(run, owner), Spikes(samples, stop, stop_after)], stop)

    launch_within(main, 2, timeout_s=240, log_dir=folder.logs)


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
    shutil.copytree(checkpoint(rewound, 4), checkpoint(tmp_path, 4))
    file = checkpoint(tmp_path, 4) / "state.json"
    content = json.loads(file.read_text())
    assert content["run"]["consumed_samples"] == 32
    content["run"] |= {"consumed_samples": 72, "recent": []}
    file.write_text(json.dumps(sealed(content)))
    train_with(config_file, tmp_path, (), ())
    assert_same_tensors(checkpoint(rewound, 10), checkpoint(tmp_path, 10))
    of_rule = {"num_spikes", "num_rewinds"}
    rows = [{key: value for key, value in row.items() if key not in of_rule} for row in steps(rewound)]
    assert rows[4:] == steps(tmp_path)
    assert evaluations(rewound) == evaluations(tmp_path)


def test_what_a_run_says_of_its_rewinds(rewound: Path) -> None:
    assert [row["step"] for row in steps(rewound)] == list(range(1, 11))
    assert [row["num_rewinds"] for row in steps(rewound)] == [0] * 4 + [2] * 6
    spike, first, _, second = incidents(rewound)
    # The second one is two steps after the checkpoint.
    assert [(event.step, event.kind) for event in incidents(rewound)] == [
        (step, kind) for step in (7, 6) for kind in ("spike", "rewind")
    ]
    assert "went back to the checkpoint of step 4, and passed over samples 32 to 56 (rewind 1 of 5)" in first.message
    assert "gradient norm" in spike.message
    assert "passed over samples 32 to 72 (rewind 2 of 5)" in second.message


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
    """So is one before the first checkpoint, to which a run could go back."""
    for name, rule in (("skip", "health.spikes.action=skip"), ("early", "health.spikes.action=rewind")):
        train_with(config_file, tmp_path / name, (rule, *RULE, "checkpoint.every_steps=8"), (48,))
        state = read_state(checkpoint(tmp_path / name, 10)).run
        assert (state.num_updates, state.num_skipped, state.num_spikes, state.num_rewinds) == (9, 1, 1, 0)
        (incident,) = incidents(tmp_path / name)
        assert (incident.step, incident.kind) == (7, "spike")
        assert incident.message.endswith("; its update was not applied")
        assert [row["num_spikes"] for row in steps(tmp_path / name)] == [0] * 6 + [1] * 4
