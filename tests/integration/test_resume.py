"""A run that was stopped, or killed, goes on as if it had never been: bit for bit on its own layout, to rounding on
another.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import (
    Megamem,
    Start,
    assert_no_orphans,
    assert_same_tensors,
    checkpoint,
    evaluations,
    last_step,
    steps,
    wait_until,
)

from parallel.processes.launch import RankError
from pretrain.config.stages import load_config
from pretrain.engine import build
from pretrain.engine.session import session
from pretrain.run.folder import RunFolder
from pretrain.train.callback import Callback, Row
from pretrain.train.callbacks import default_callbacks
from pretrain.train.loop import train
from pretrain.train.run import Run, open_run
from tests.deadline import launch_within
from tests.rotation import in_rotation

Rates = dict[int, list[tuple[str, float, float]]]


@dataclass(frozen=True)
class Layout:
    """Overrides and ranks that a run is trained with."""

    overrides: tuple[str, ...]
    num_ranks: int


LAYOUTS = {
    "one rank": Layout((), 1),
    "tensor 2 x pipeline 2": Layout(("parallel.tensor=2", "parallel.pipeline=2"), 4),
}


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, and per rank what every parameter group was updated with, by step."""

    path: Path
    rates: list[Rates]


class Recorder(Callback):
    """Notes (name, learning rate, weight decay) of every parameter group at every step."""

    def __init__(self) -> None:
        self.rates: Rates = {}

    def on_step(self, run: Run, row: Row) -> None:
        self.rates[run.state.step] = [
            (group["name"], group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups
        ]


class AskToStop(Callback):
    """Sends this rank SIGTERM during the evaluation and saving after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, run: Run, row: Row) -> None:
        if run.state.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


class AskToStopInEvaluation(Callback):
    """Sends this rank SIGTERM in the first forward pass of the evaluation after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, run: Run, row: Row) -> None:
        if run.state.step == self._step - 1:
            run.chunks[-1].register_forward_hook(
                lambda chunk, *_: None if chunk.training else os.kill(os.getpid(), signal.SIGTERM)
            )


class DieInStep(Callback):
    """Kills this rank in the middle of a step: after its first microbatch went forward through the model."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, run: Run, row: Row) -> None:
        if run.state.step == self._step - 1:
            run.chunks[-1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def train_in_ranks(
    config_file: Path, path: Path, layout: Layout, extra: Callable[[int], Sequence[Callback]] = lambda rank: ()
) -> Trained:
    """Does what `megamem train` does, with more callbacks."""
    config = load_config(config_file, layout.overrides)

    def main() -> Rates:
        with session(config) as groups:
            run = open_run(config, RunFolder(path), groups)
            recorder = Recorder()
            train(run, [*default_callbacks(run), recorder, *extra(groups.rank)])
            return recorder.rates

    return Trained(path, launch_within(main, layout.num_ranks, timeout_s=240, log_dir=path / "logs"))


ON_ONE = pytest.mark.parametrize("layout", ["one rank"], indirect=True)
ON_FOUR = pytest.mark.parametrize("layout", ["tensor 2 x pipeline 2"], indirect=True)
# In one week some of the tests take the one layout and the rest the other, and in the next week it is the other way round.
ON_ONE_FIRST = pytest.mark.parametrize("layout", in_rotation(list(LAYOUTS), 2), indirect=True)
ON_FOUR_FIRST = pytest.mark.parametrize("layout", in_rotation(list(reversed(LAYOUTS)), 2), indirect=True)


@pytest.fixture(scope="module")
def config_file(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's configuration with ten steps, and a checkpoint in the middle of them."""
    config = yaml.safe_load(config_file.read_text())
    config["train"]["num_steps"] = 10
    config["checkpoint"]["every_steps"] = 5
    path = tmp_path_factory.mktemp("config") / "ten_steps.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module", params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def straight(layout: Layout, config_file: Path, tmp_path_factory: pytest.TempPathFactory, warm: None) -> Trained:
    """10 steps without a break."""
    return train_in_ranks(config_file, tmp_path_factory.mktemp("straight") / "run", layout)


@pytest.fixture(scope="module")
def stopped(layout: Layout, config_file: Path, tmp_path_factory: pytest.TempPathFactory, warm: None) -> Path:
    """5 of the 10 steps: the last rank is asked to stop after step 4. Copy it to go on."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(RankError, match="stopped at step 5 of 10") as stop:
        train_in_ranks(config_file, path, layout, lambda rank: [AskToStop(4)] if rank == layout.num_ranks - 1 else [])
    assert stop.value.exit_code == 75
    assert stop.value.failure.is_user_error
    return path


def copy(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def assert_same_run(actual: Path, expected: Path) -> None:
    assert steps(actual) == steps(expected)
    assert [row["step"] for row in steps(actual)] == list(range(1, 11))
    assert evaluations(actual) == evaluations(expected)
    assert_same_tensors(checkpoint(actual, 10), checkpoint(expected, 10))


def test_the_groups_have_rates_of_their_own(straight: Trained) -> None:
    for rates in straight.rates:
        last = {name: lr for name, lr, _ in rates[10]}
        middle = {name: lr for name, lr, _ in rates[5]}
        assert middle["values"] / middle["backbone"] != pytest.approx(last["values"] / last["backbone"])
        assert middle["pre_values"] == pytest.approx(2 * middle["backbone"])


@ON_ONE_FIRST
def test_five_steps_and_five_more_equal_ten(
    straight: Trained, stopped: Path, layout: Layout, config_file: Path, tmp_path: Path
) -> None:
    resumed = train_in_ranks(config_file, copy(stopped, tmp_path / "run"), layout)
    assert_same_run(resumed.path, straight.path)
    for before, after in zip(straight.rates, resumed.rates, strict=True):
        assert after == {step: groups for step, groups in before.items() if step > 5}


@ON_FOUR_FIRST
def test_a_rank_killed_in_mid_step_costs_nothing(
    straight: Trained, layout: Layout, config_file: Path, tmp_path: Path
) -> None:
    victim = layout.num_ranks - 1
    with pytest.raises(RankError, match=f"rank {victim} was killed by SIGKILL") as failure:
        train_in_ranks(config_file, tmp_path / "run", layout, lambda rank: [DieInStep(8)] if rank == victim else [])
    assert failure.value.failure.rank == victim
    assert last_step(tmp_path / "run") == 7
    train_in_ranks(config_file, tmp_path / "run", layout)
    assert_same_run(tmp_path / "run", straight.path)


@pytest.mark.parametrize(
    ("layout", "step"),
    [(Layout(("parallel.pipeline=2",), 2), 2), (LAYOUTS["one rank"], 4)],
    ids=["in the middle, two ranks", "at the end, one rank"],
)
def test_a_stop_leaves_an_evaluation_to_the_next_start(
    layout: Layout, step: int, config_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    """A pass of 16 microbatches, and one of fewer, of which the first one is finished."""
    words = ("train.num_steps=4", "train.micro_batch_size=2", "evaluation={every_steps: 2, max_sequences: 36}")
    layout = Layout((*layout.overrides, *words), layout.num_ranks)
    straight = train_in_ranks(config_file, tmp_path / "straight", layout).path
    run, victim = tmp_path / "run", layout.num_ranks - 1
    with pytest.raises(
        RankError, match=f"stopped at step {step} of 4 as asked.* with the evaluation of this step first"
    ):
        train_in_ranks(config_file, run, layout, lambda rank: [AskToStopInEvaluation(step)] if rank == victim else [])
    assert last_step(run) == step
    assert [row["step"] for row in evaluations(run)] == [2][: step // 2 - 1]
    command = ("train", config_file, *layout.overrides, "--run-dir", run)
    result = megamem(*command)
    assert result.code == 0, result.output
    assert f"(step {step})" in result.output
    assert steps(run) == steps(straight)
    assert evaluations(run) == evaluations(straight)
    assert_same_tensors(checkpoint(run, 4), checkpoint(straight, 4))
    # What is made up for is owed no more.
    assert "is finished: 4 steps done" in megamem(*command).output
    assert evaluations(run) == evaluations(straight)


@ON_FOUR
def test_a_killed_rank_ends_the_command(layout: Layout, config_file: Path, tmp_path: Path, start: Start) -> None:
    """A rank is killed from outside, at whatever moment of a step that is."""
    command = start("train", config_file, *layout.overrides, "--run-dir", tmp_path / "run")
    wait_until(lambda: last_step(tmp_path / "run") >= 1, "a step")
    victim = command.ranks()[-1]
    assert len(command.ranks()) == layout.num_ranks
    victim.kill()
    result = command.wait()
    assert result.code == 1
    assert f"rank {layout.num_ranks - 1} was killed by SIGKILL" in result.output
    assert_no_orphans(command)


@ON_ONE_FIRST
def test_a_command_that_is_asked_to_stop_saves_and_can_go_on(
    straight: Trained,
    layout: Layout,
    config_file: Path,
    tmp_path: Path,
    start: Start,
    megamem: Megamem,
) -> None:
    command = start("train", config_file, *layout.overrides, "--run-dir", tmp_path / "run")
    wait_until(lambda: last_step(tmp_path / "run") >= 1, "a step")
    os.kill(command.pid, signal.SIGUSR1 if layout.num_ranks > 1 else signal.SIGINT)
    result = command.wait()
    assert result.code == 75, result.output
    step = last_step(tmp_path / "run")
    assert f"megamem: stopped at step {step} of 10 as asked" in result.last_line
    assert "error" not in result.last_line
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step:08d}"]
    assert_no_orphans(command)
    result = megamem("train", config_file, *layout.overrides, "--run-dir", tmp_path / "run")
    assert result.code == 0, result.output
    assert f"(step {step})" in result.output
    assert_same_run(tmp_path / "run", straight.path)


def test_a_killed_launcher_leaves_nothing_behind(config_file: Path, tmp_path: Path, start: Start) -> None:
    command = start("train", config_file, "--nproc", 2, "--run-dir", tmp_path / "run")
    wait_until(lambda: last_step(tmp_path / "run") >= 2, "step 2")
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    assert_no_orphans(command)


@ON_ONE
def test_a_second_run_in_the_same_folder_is_told_of_the_first(
    straight: Trained, layout: Layout, config_file: Path, tmp_path: Path, start: Start, megamem: Megamem
) -> None:
    first = start("train", config_file, *layout.overrides, "--run-dir", tmp_path / "run")
    wait_until(lambda: last_step(tmp_path / "run") >= 1, "a step")
    for process in first.ranks():
        process.suspend()
    (claim,) = (tmp_path / "run" / "owner").iterdir()
    owner = json.loads(claim.read_text())
    four = LAYOUTS["tensor 2 x pipeline 2"].overrides
    result = megamem("train", config_file, *four, "--run-dir", tmp_path / "run")
    assert result.code == 2
    assert f"is in use by process {owner['pid']} on {owner['host']}" in " ".join(result.output.split())
    assert owner["pid"] in [process.pid for process in first.ranks()]
    for process in first.ranks():
        process.resume()
    assert first.wait().code == 0
    assert_same_run(tmp_path / "run", straight.path)
    assert json.loads(claim.read_text()) == {**owner, "life": "       ended"}


@pytest.mark.parametrize(
    ("layout", "other"),
    in_rotation(
        [
            pytest.param("one rank", ("--nproc", 2), id="to data 2"),
            pytest.param("tensor 2 x pipeline 2", ("--nproc", 1), id="to one rank"),
        ],
        2,
    ),
    indirect=["layout"],
)
def test_another_layout_goes_on_to_rounding(
    straight: Trained, stopped: Path, config_file: Path, tmp_path: Path, megamem: Megamem, other: tuple[object, ...]
) -> None:
    run = copy(stopped, tmp_path / "run")
    result = megamem("train", config_file, "--run-dir", run, *other)
    assert result.code == 0, result.output
    assert [row["step"] for row in steps(run)] == list(range(1, 11))
    for key in ("loss", "grad_norm"):
        # Roundings grow, until a selection that is nearly a tie becomes another one: five steps after going on.
        found, expected = ([row[key] for row in steps(path)] for path in (run, straight.path))
        assert found == pytest.approx(expected, rel=1e-5)


@ON_ONE
def test_a_finished_run_can_be_made_longer(
    straight: Trained, layout: Layout, config_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    run = copy(straight.path, tmp_path / "run")
    result = megamem("train", config_file, *layout.overrides, "--run-dir", run, "train.num_steps=13")
    assert result.code == 0, result.output
    assert "changed since: train.num_steps: 10 -> 13" in result.output
    assert steps(run)[:10] == steps(straight.path)
    added: list[dict[str, Any]] = steps(run)[10:]
    assert [row["step"] for row in added] == [11, 12, 13]
    assert [row["consumed_samples"] for row in added] == [88, 96, 104]
    assert [row["step"] for row in evaluations(run)] == [10, 13]


@ON_ONE
def test_a_resumed_run_may_change_how_it_is_run_and_says_so(
    straight: Trained, stopped: Path, layout: Layout, config_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    """RoPE's base is no part of the weights: the five steps stay, and the sixth computes something else."""
    run = copy(stopped, tmp_path / "run")
    result = megamem("train", config_file, *layout.overrides, "--run-dir", run, "model.rotary_base=100")
    assert result.code == 0, result.output
    assert "changed since: model.rotary_base: 10000 -> 100" in result.output
    losses, before = ([row["loss"] for row in steps(path)] for path in (run, straight.path))
    assert losses[:5] == before[:5]
    assert losses[5] != before[5]


def refuse_to_draw() -> None:
    """Let whoever draws initial weights fail, in the process that calls this and those it forks."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("initial weights were drawn")

    build.initialise = fail  # type: ignore[assignment]


@ON_ONE
def test_only_a_run_that_starts_draws_weights(
    stopped: Path, layout: Layout, config_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    run = copy(stopped, tmp_path / "run")
    train_on = ("train", config_file, *layout.overrides, "train.num_steps=6", "--run-dir")
    for command in ((*train_on, run), ("eval", run, "--own-layout"), ("generate", run, "--prompt", "a")):
        result = megamem(*command, before=refuse_to_draw)
        assert result.code == 0, result.output
    fresh = megamem(*train_on, tmp_path / "fresh", before=refuse_to_draw)
    assert fresh.code == 1
    assert "initial weights were drawn" in fresh.output


@ON_ONE
def test_the_batch_may_change(
    stopped: Path, layout: Layout, config_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    run = copy(stopped, tmp_path / "run")
    result = megamem(
        "train", config_file, *layout.overrides, "--run-dir", run, "train.global_batch_size=4", "train.num_steps=7"
    )
    assert result.code == 0, result.output
    assert [row["consumed_samples"] for row in steps(run)][4:] == [40, 44, 48]
