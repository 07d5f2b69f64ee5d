"""The training loop around the step: what happens in which order, on which steps, with which arguments. The step itself
is a stand-in.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel

import pretrain.train.callbacks as callbacks_module
import pretrain.train.loop as loop
import pretrain.train.run as run_module
from megamem.config import ModelConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.checkpoint.saver import Saver, SaveReport
from pretrain.config.health import HealthConfig, SlowRankConfig
from pretrain.config.schema import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from pretrain.engine.optimizer import GradientNorms
from pretrain.engine.step import LossSum, StepResult
from pretrain.engine.votes import SaveVotes
from pretrain.errors import StoppedEarly, UserError
from pretrain.evaluation.evaluate import Evaluation
from pretrain.run.folder import RunFolder
from pretrain.run.history import End, Incident, Start, read_history
from pretrain.state import RunState
from pretrain.train.callback import Callback
from pretrain.train.callbacks import MetricsFile, TensorBoard, default_callbacks
from pretrain.train.run import Run

DATA_SIZE, DATA_RANK, WORLD_SIZE = 2, 1, 4

CONFIG = RunConfig(
    seed=5,
    model=ModelConfig(memory=UltraMemV2Config()),
    train=TrainConfig(num_steps=12, global_batch_size=12, micro_batch_size=2, sequence_length=8, max_skipped_steps=3),
    # 96 tokens a step: the multiplier of the tables has fallen from 5 to 2 after 6 steps.
    optimizer=OptimizerConfig(
        lr=8.0,
        schedule="constant",
        warmup_steps=4,
        weight_decay=0.25,
        value_weight_decay=0.5,
        value_lr_multiplier=5.0,
        value_lr_end_multiplier=2.0,
        value_lr_decay_tokens=6 * 96,
        pre_value_lr_multiplier=0.5,
    ),
    parallel=ParallelConfig(pipeline=2),
    logging=LoggingConfig(memory_every_steps=0),
)
START = RunState()
BACKBONE_RATES = [2.0, 4.0, 6.0] + 9 * [8.0]
MULTIPLIERS = [5.0, 4.5, 4.0, 3.5, 3.0, 2.5] + 6 * [2.0]
VALUE_RATES = [rate * multiplier for rate, multiplier in zip(BACKBONE_RATES, MULTIPLIERS, strict=True)]


@dataclass
class Step:
    """Arguments of one call of the step.

    Attributes:
        groups: learning rate and weight decay by group.
        samples: numbers of the samples of every microbatch, per chunk.
        arguments: by keyword.
    """

    groups: dict[str, tuple[float, float]]
    samples: list[list[list[int]]]
    arguments: dict[str, Any]


@dataclass
class World:
    """A run whose step, checkpoints, evaluation and observation of the memory are stand-ins that write down what is
    asked of them.

    Attributes:
        log: what happened, in order.
        steps: the calls of the step.
        skipped: steps (from 1) without a finite gradient.
        asked: the step (from 1) on which some rank was told to stop.
        weights_are_complete: since the last step.
    """

    run: Run
    log: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    asked: int = 0
    weights_are_complete: bool = False

    def complete_weights(self, chunks: Any) -> None:
        assert chunks == self.run.chunks
        self.weights_are_complete = True

    def train(self) -> None:
        # The progress line writes to the terminal; nothing depends on it.
        loop.train(self.run, default_callbacks(self.run))

    def step(self, chunks: Any, optimizer: Any, iterators: Any, groups: Any, **arguments: Any) -> StepResult:
        assert (chunks, optimizer, groups) == (self.run.chunks, self.run.optimizer, self.run.groups)
        number = self.run.state.step + 1
        self.log.append(f"step {number}")
        self.weights_are_complete = False
        samples = [
            [next(stream)["number"].tolist() for _ in range(arguments["num_microbatches"])] for stream in iterators
        ]
        of_group = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
        self.steps.append(Step(of_group, samples, arguments))
        norms = GradientNorms(math.inf if number in self.skipped else 0.5, None)
        return StepResult(LossSum(6.0, 4.0), {}, norms, arguments["stop_requested"] or number == self.asked, 0, 0)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of steps and evaluations."""
        return [row for row in self.all_rows if "save_s" not in row]

    @property
    def saves(self) -> list[dict[str, Any]]:
        return [row for row in self.all_rows if "save_s" in row]

    @property
    def all_rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.folder.metrics.read_text().splitlines()]


class SaverDouble(Saver):
    """Notes what it is to save; a save is complete when it is told to advance, or to finish."""

    def __init__(self, log: list[str], config: RunConfig, folder: Path) -> None:
        super().__init__()
        self.log, self.expected = log, (config, folder)
        self.in_flight: int | None = None

    @property
    def votes(self) -> SaveVotes:
        return SaveVotes(done=self.in_flight is not None)

    def start(self, config: RunConfig, state: RunState, entries: Any, folder: Path) -> None:
        assert ((config, folder), entries) == (self.expected, f"entries of {state.step}")
        self.log.append(f"save {state.step}")
        self.in_flight = state.step

    def advance(self) -> None:
        if self.in_flight is not None:
            self.reports.append(SaveReport(self.in_flight, 0.5, 2.5, 1000))
            self.in_flight = None

    def finish(self) -> None:
        self.advance()

    def abandon(self) -> None:
        self.log.append("abandon")


class Samples:
    """Samples without end; each is its number."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(index), "position_ids": torch.arange(8)}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a `World` from a configuration and a state."""
    # A signal that the loop does not take must fail a test, not end the session.
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}

    def make(config: RunConfig = CONFIG, state: RunState = START, is_main: bool = True) -> World:
        nothing: Any = None
        groups: Any = SimpleNamespace(
            is_main=is_main,
            rank=0 if is_main else 1,
            data_size=DATA_SIZE,
            data_rank=DATA_RANK,
            world_size=WORLD_SIZE,
            device=torch.device("cpu"),
            megatron=SimpleNamespace(tp_dp_cp="the stage"),
        )
        names = ("backbone", "backbone_no_decay", "retrieval", "experts", "values", "pre_values")
        optimizer: Any = SimpleNamespace(param_groups=[{"name": name} for name in names])
        chunks: Any = [SimpleNamespace(), SimpleNamespace()]
        run = Run(config, RunFolder(tmp_path), groups, nothing, Samples(), "held out", chunks, optimizer, state, 1e12)  # type: ignore[arg-type]
        world = World(run)
        run.saver = SaverDouble(world.log, config, tmp_path / "checkpoints")

        def entries(config: RunConfig, chunks: Any, optimizer: Any) -> str:
            assert (config, chunks, optimizer) == (run.config, run.chunks, run.optimizer)
            assert world.weights_are_complete
            return f"entries of {run.state.step}"

        def evaluate(*arguments: Any, **keywords: Any) -> Evaluation:
            assert arguments == (run.chunks, run.held_out, run.groups)
            assert keywords == {"micro_batch_size": config.train.micro_batch_size, "pipeline": 2}
            world.log.append(f"evaluate {run.state.step}")
            return Evaluation(1.5, 2.5, 3, 4)

        class Collector:
            def __init__(self, layers: Any, **keywords: Any) -> None:
                assert keywords["stage_group"] == "the stage"

            def start(self) -> None:
                world.log.append("observe")

            def finish(self) -> dict[int, dict[str, float]]:
                assert world.weights_are_complete
                world.log.append("observed")
                return {3: {"coverage": 0.25}}

        monkeypatch.setattr(loop, "train_step", world.step)
        monkeypatch.setattr(loop, "seed_step", lambda seed, step: world.log.append(f"seed {seed} {step}"))
        monkeypatch.setattr(run_module, "entries_to_save", entries)
        monkeypatch.setattr(run_module, "complete_weights", world.complete_weights)
        monkeypatch.setattr(callbacks_module, "evaluate", evaluate)
        monkeypatch.setattr(callbacks_module, "UsageCollector", Collector)
        monkeypatch.setattr(callbacks_module, "unwrap", lambda chunk: SimpleNamespace(memory_layers=[]))
        return world

    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)


def spaced(*, rows: int = 1, usage: int = 0, evaluation: int = 0, checkpoint: int = 0) -> RunConfig:
    """Configuration with intervals in steps."""
    return replace(
        CONFIG,
        logging=LoggingConfig(every_steps=rows, memory_every_steps=usage),
        evaluation=EvaluationConfig(every_steps=evaluation),
        checkpoint=CheckpointConfig(every_steps=checkpoint),
    )


# The steps


def test_every_step_is_seeded_given_its_rates_and_taken_once(make: Any) -> None:
    world = make()
    world.train()
    seeds_and_steps = [line for line in world.log if line.startswith(("seed", "step"))]
    assert seeds_and_steps == [line for step in range(12) for line in (f"seed 5 {step}", f"step {step + 1}")]
    for step, lr, value_lr in zip(world.steps, BACKBONE_RATES, VALUE_RATES, strict=True):
        assert step.groups == {
            "backbone": (lr, 0.25),
            "backbone_no_decay": (lr, 0.0),
            "retrieval": (lr, 0.25),
            "experts": (lr, 0.25),
            "values": (value_lr, 0.5),
            "pre_values": (lr * 0.5, 0.5),
        }


def test_the_rows_say_what_the_steps_were_taken_with(make: Any) -> None:
    world = make()
    world.skipped = {2, 3, 7}
    world.train()
    rows = [row for row in world.rows if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["lr"] for row in rows] == BACKBONE_RATES
    assert [row["value_lr"] for row in rows] == VALUE_RATES
    assert {row["loss"] for row in rows} == {1.5}
    assert [row["grad_norm"] for row in rows] == [None if step in world.skipped else 0.5 for step in range(1, 13)]
    assert [row["consumed_samples"] for row in rows] == list(range(12, 145, 12))
    assert [row["consumed_tokens"] for row in rows] == list(range(96, 1153, 96))
    assert [row["num_skipped"] for row in rows] == [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert not any("value_grad_norm" in row or "memory" in row for row in rows)
    for row in rows:
        assert row["tokens_per_s"] * row["step_s"] == pytest.approx(96)
        # A unit of 1e12 operations per token, over four ranks.
        assert row["tflops_per_gpu"] == pytest.approx(row["tokens_per_s"] / 4)
    assert world.run.state == RunState(12, 144, 1152, 9, 3, 0)


def test_a_row_says_what_the_groups_carried_and_else_what_the_schedule_has(make: Any) -> None:
    """A schedule that is applied wrongly shows; a stage without tables has no group to say it."""
    world = make(state=RunState(step=3))
    groups = world.run.optimizer.param_groups
    result = StepResult(LossSum(6.0, 4.0), {}, GradientNorms(0.5, 0.75), False, 0, 0)
    for group in groups:
        group["lr"] = {"backbone": 0.125, "values": 0.375}.get(group["name"], 1.0)
    row = loop._account(world.run, result, 0.1)
    assert (row["lr"], row["value_lr"], row["value_grad_norm"]) == (0.125, 0.375, 0.75)
    world.run.state = RunState(step=1)
    world.run.optimizer.param_groups = [group for group in groups if group["name"] != "values"]
    row = loop._account(world.run, result, 0.1)
    assert (row["lr"], row["value_lr"]) == (0.125, VALUE_RATES[1])


def test_a_dense_model_has_no_rate_of_tables(make: Any) -> None:
    world = make(replace(CONFIG, model=ModelConfig()))
    world.train()
    assert not any("value_lr" in row for row in world.rows)


def test_losses_of_blocks_are_averaged_and_kept_by_block(make: Any) -> None:
    world = make()
    world.run.optimizer.param_groups = []
    auxiliary = {"key_balance": {0: 1.0, 2: 4.0}, "moe_z": {1: 3.0}}
    row = loop._account(world.run, StepResult(LossSum(6.0, 4.0), auxiliary, GradientNorms(0.5, None), False, 0, 0), 0.1)
    assert (row["key_balance"], row["moe_z"]) == (2.5, 3.0)
    assert row["memory"] == {"0": {"key_balance": 1.0}, "2": {"key_balance": 4.0}}
    assert row["moe"] == {"1": {"moe_z": 3.0}}


def test_the_steps_read_consecutive_samples_and_a_resumed_run_the_next(make: Any) -> None:
    """Twelve samples a step; of every four, this rank, the second of two, reads the last two."""
    for done in (0, 9):
        world = make(state=RunState(step=done, consumed_samples=12 * done))
        world.train()
        for number, step in enumerate(world.steps, start=done):
            first = 12 * number + 2
            expected = [[first, first + 1], [first + 4, first + 5], [first + 8, first + 9]]
            assert step.samples == [expected, expected]
            # Without a rule nothing is a spike.
            assert step.arguments.pop("judge")(1e9, 1e9) is None
            assert step.arguments == {
                "num_microbatches": 3,
                "micro_batch_size": 2,
                "sequence_length": 8,
                "stop_requested": False,
                "save_votes": SaveVotes(),
            }


def test_seeds_are_of_the_run_and_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def seed(value: int, **keywords: Any) -> None:
        assert keywords == {"force_reset_rng": True}
        seeds.append(value)

    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", seed)
    for of_run in (1, 2, 3):
        for step in range(50):
            loop.seed_step(of_run, step)
    assert len(set(seeds)) == 150
    loop.seed_step(2, 7)
    assert seeds[-1] == seeds[57]
    loop.seed_step(10**9, 10**9)
    assert 0 <= seeds[-1] < 2**31


# Events every so many steps


@pytest.mark.parametrize(
    ("config", "rows", "observed", "evaluated", "saved"),
    [
        (spaced(), list(range(1, 13)), [], [12], [12]),
        (spaced(rows=5), [5, 10, 12], [], [12], [12]),
        (spaced(rows=4, usage=6), [4, 6, 8, 12], [6, 12], [12], [12]),
        (spaced(rows=5, usage=1), list(range(1, 13)), list(range(1, 13)), [12], [12]),
        (spaced(evaluation=5), list(range(1, 13)), [], [5, 10, 12], [12]),
        (spaced(evaluation=4), list(range(1, 13)), [], [4, 8, 12], [12]),
        (spaced(checkpoint=5), list(range(1, 13)), [], [12], [5, 10, 12]),
        (spaced(checkpoint=6), list(range(1, 13)), [], [12], [6, 12]),
        (spaced(rows=100, usage=5, evaluation=3, checkpoint=4), [5, 10, 12], [5, 10], [3, 6, 9, 12], [4, 8, 12]),
        (spaced(usage=100, evaluation=100, checkpoint=100), list(range(1, 13)), [], [12], [12]),
    ],
    ids=[
        "by default",
        "rows",
        "rows and usage",
        "usage on every step",
        "evaluation",
        "evaluation of the last step too",
        "checkpoints",
        "a checkpoint of the last step too",
        "all",
        "more than the run has",
    ],
)
def test_rows_evaluations_and_checkpoints_are_on_the_steps_that_were_asked_for(
    make: Any, config: RunConfig, rows: list[int], observed: list[int], evaluated: list[int], saved: list[int]
) -> None:
    world = make(config)
    world.train()
    assert [row["step"] for row in world.rows if "loss" in row] == rows
    assert [row["step"] for row in world.rows if "memory" in row] == observed
    evaluations = [row for row in world.rows if "validation_loss" in row]
    assert evaluations == [
        {
            "step": step,
            "validation_loss": 1.5,
            "bits_per_byte": 2.5,
            "validation_tokens": 3,
            "validation_bytes": 4,
        }
        for step in evaluated
    ]
    assert [line for line in world.log if line.startswith("save")] == [f"save {step}" for step in saved]
    assert [line for line in world.log if line.startswith("evaluate")] == [f"evaluate {step}" for step in evaluated]
    assert world.log.count("observed") == len(observed)


def test_a_step_is_observed_from_its_beginning_and_evaluated_before_it_is_saved(make: Any) -> None:
    world = make(spaced(usage=3, evaluation=3, checkpoint=3))
    world.train()
    third = world.log.index("step 3")
    assert world.log[third - 2 : third + 5] == [
        "observe",
        "seed 5 2",
        "step 3",
        "observed",
        "evaluate 3",
        "save 3",
        "seed 5 3",
    ]
    # The row of the step stands before that of its evaluation.
    assert [("loss" in row) for row in world.rows if row["step"] == 3] == [True, False]
    (row,) = [row for row in world.rows if row["step"] == 3 and "loss" in row]
    assert row["memory"] == {"3": {"coverage": 0.25}}


def test_the_first_step_can_be_observed(make: Any) -> None:
    world = make(spaced(usage=1))
    world.train()
    assert world.log[:3] == ["observe", "seed 5 0", "step 1"]
    assert [line for line in world.log if line not in ("observe", "observed")][-3:] == [
        "step 12",
        "evaluate 12",
        "save 12",
    ]
    assert world.log.count("observed") == 12


def test_a_resumed_run_keeps_rows_up_to_its_checkpoint_and_its_steps_fall_alike(make: Any, tmp_path: Path) -> None:
    old = [{"step": step, "loss": 9.0} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old) + '{"step": 9, "lo')
    state = RunState(step=6, consumed_samples=72, consumed_tokens=576, num_updates=6)
    world = make(spaced(rows=4, usage=7, evaluation=3, checkpoint=4), state=state)
    world.run.last_saved_step = 6
    world.train()
    assert world.rows[:6] == old[:6]
    assert [row["step"] for row in world.rows[6:] if "loss" in row] == [7, 8, 12]
    assert [row["step"] for row in world.rows[6:] if "loss" not in row] == [9, 12]
    assert world.log[:3] == ["observe", "seed 5 6", "step 7"]
    assert [line for line in world.log if line.startswith("save")] == ["save 8", "save 12"]
    assert [step.groups["values"][0] for step in world.steps] == VALUE_RATES[6:]


def owner_of(checks: list[str]) -> Any:
    return SimpleNamespace(check=lambda: checks.append("check"))


def test_an_owner_records_where_it_started_and_that_all_was_saved(make: Any) -> None:
    """Two starts: one is asked to stop at the fifth step, the other ends with an error."""
    world, checks = make(spaced(checkpoint=4)), list[str]()
    world.asked = 5
    with pytest.raises(StoppedEarly):
        loop.train(world.run, default_callbacks(world.run, owner_of(checks)))
    resumed = make(state=world.run.state)
    resumed.skipped = set(range(6, 20))
    with pytest.raises(UserError, match="no finite gradient"):
        loop.train(resumed.run, default_callbacks(resumed.run, owner_of(checks)))
    start, end, again, *incidents = read_history(world.run.folder)
    assert [(event.step, event.kind) for event in incidents if isinstance(event, Incident)] == [
        (step, "non-finite") for step in (6, 7, 8)
    ]
    assert isinstance(start, Start)
    assert isinstance(end, End)
    assert isinstance(again, Start)
    assert (start.step, start.consumed_tokens, start.num_ranks) == (0, 0, WORLD_SIZE)
    assert (end.step, end.consumed_tokens) == (5, world.run.state.consumed_tokens)
    assert (again.step, again.consumed_tokens) == (5, end.consumed_tokens)
    assert "check" in checks


def test_an_end_is_recorded_after_the_last_save(make: Any) -> None:
    world = make()
    events: list[int] = []
    finish = world.run.saver.finish

    def finish_and_count() -> None:
        events.append(len(read_history(world.run.folder)))
        finish()

    world.run.saver.finish = finish_and_count
    loop.train(world.run, default_callbacks(world.run, owner_of([])))
    assert events[-1] == 1
    assert len(read_history(world.run.folder)) == 2


def test_ranks_but_the_first_write_nothing_and_take_part_in_all_else(make: Any) -> None:
    world = make(spaced(usage=4, evaluation=4, checkpoint=4), is_main=False)
    world.train()
    assert not world.run.folder.metrics.exists()
    assert [line for line in world.log if not line.startswith(("seed", "step"))] == [
        line for step in (4, 8, 12) for line in ("observe", "observed", f"evaluate {step}", f"save {step}")
    ]


def test_trackers_get_the_same_rows_as_the_file(make: Any) -> None:
    world = make(spaced(rows=5, usage=7, evaluation=5))
    tracked: list[tuple[str, float, int]] = []
    tracker = TensorBoard()
    tracker.on_start = lambda run: None  # type: ignore[method-assign]
    writer: Any = SimpleNamespace(
        add_scalar=lambda *scalar: tracked.append(scalar), close=lambda: tracked.append(("closed", 0, 0))
    )
    tracker._writer = writer
    callbacks = {type(callback).__name__: callback for callback in default_callbacks(world.run)}
    measuring, file, evaluations, checkpoints = (
        callbacks[name] for name in ("MemoryUsage", "MetricsFile", "Evaluations", "Checkpoints")
    )
    assert isinstance(file, MetricsFile)
    evaluations._listeners = [tracker]  # type: ignore[attr-defined]
    checkpoints._listeners = []  # type: ignore[attr-defined]
    loop.train(world.run, [measuring, file, tracker, evaluations, checkpoints])
    steps_of = {name: [step for found, _, step in tracked if found == name] for name, _, _ in tracked}
    assert steps_of["loss"] == [row["step"] for row in world.rows if "loss" in row] == [5, 7, 10, 12]
    assert steps_of["memory/3/coverage"] == [7]
    assert steps_of["validation_loss"] == [5, 10, 12]
    assert "step" not in steps_of
    assert tracked[-1][0] == "closed"


# The end


class Ends(Callback):
    """Notes where the run ended."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def on_end(self, run: Run) -> None:
        self.ends.append(run.state.step)


def test_a_run_that_some_rank_was_told_to_stop_ends_after_the_step_and_is_saved(make: Any) -> None:
    world, ends = make(), Ends()
    world.asked = 5
    with pytest.raises(StoppedEarly, match="stopped at step 5 of 12"):
        loop.train(world.run, [ends, *default_callbacks(world.run)])
    assert ends.ends == [5]
    assert world.log[-1] == "save 5"
    assert "evaluate 5" not in world.log


def test_a_signal_stops_after_the_next_step(make: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        world = make()

        class Kill(Callback):
            def on_step(self, run: Run, row: dict[str, Any], number: int = number) -> None:
                if run.state.step == 3:
                    os.kill(os.getpid(), number)

        with pytest.raises(StoppedEarly, match="stopped at step 4 of 12"):
            loop.train(world.run, [Kill()])
        assert [step.arguments["stop_requested"] for step in world.steps] == [False, False, False, True]


def test_a_run_that_is_told_to_stop_on_its_last_step_is_finished(make: Any) -> None:
    world = make()
    world.asked = 12
    world.train()
    assert world.log[-2:] == ["evaluate 12", "save 12"]


def test_too_many_skipped_steps_in_a_row_end_the_run_as_an_error(make: Any) -> None:
    world = make()
    world.skipped = {3, 4, 6, 7, 8}
    ends = Ends()
    with pytest.raises(UserError, match=r"the last 3 steps had no finite gradient .* diverged at step 8"):
        loop.train(world.run, [ends, MetricsFile()])
    assert ends.ends == []
    assert world.run.state == RunState(8, 96, 768, 3, 5, 3)
    assert world.rows[-1]["step"] == 8


def test_the_limit_counts_skips_from_before_a_resume(make: Any) -> None:
    world = make(state=RunState(step=5, num_skipped=2, num_skipped_in_row=2))
    world.skipped = {6}
    with pytest.raises(UserError, match="the last 3 steps"):
        world.train()
    assert len(world.steps) == 1


def test_a_step_is_saved_once(make: Any) -> None:
    world = make()
    for _ in range(2):
        world.run.save()
    world.run.state = RunState(step=1)
    world.run.save()
    assert world.log == ["save 0", "save 1"]
    assert world.run.last_saved_step == 1


def test_a_save_is_told_of_when_it_is_complete(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    world = make(spaced(checkpoint=5))
    world.train()
    assert world.saves == [
        {"step": step, "save_stall_s": 0.5, "save_s": 2.5, "save_bytes": 1000} for step in (5, 10, 12)
    ]
    # The save of step 5 is in flight in step 6, in which the ranks hear of it.
    assert [row["step"] for row in world.all_rows][4:8] == [5, 6, 5, 7]
    assert [step.arguments["save_votes"].done for step in world.steps] == [step in (6, 11) for step in range(1, 13)]
    assert "saved step 5: stalled 0.5 s, written in 2.5 s, 0.001 MB" in capsys.readouterr().err


def test_a_run_that_diverges_finishes_the_save_in_flight_and_one_that_fails_abandons_it(make: Any) -> None:
    world = make(spaced(checkpoint=1))
    world.skipped = set(range(1, 20))
    with pytest.raises(UserError, match="no finite gradient"):
        world.train()
    assert world.run.saver.in_flight is None
    assert world.log[-1] == "abandon"


@pytest.mark.parametrize(
    ("config", "is_main", "kinds"),
    [
        (
            spaced(usage=3),
            True,
            "Hangs MemoryUsage MemoryWatch SlowRanks MetricsFile ProgressLine Evaluations Checkpoints NextStep",
        ),
        (spaced(), True, "Hangs SlowRanks MetricsFile ProgressLine Evaluations Checkpoints NextStep"),
        (spaced(usage=3), False, "Hangs MemoryUsage MemoryWatch SlowRanks Evaluations Checkpoints NextStep"),
        (replace(spaced(usage=3), model=ModelConfig()), False, "Hangs SlowRanks Evaluations Checkpoints NextStep"),
        (
            replace(CONFIG, logging=LoggingConfig(memory_every_steps=0, tensorboard=True, wandb_mode="offline")),
            True,
            "Hangs SlowRanks MetricsFile ProgressLine TensorBoard WandB Evaluations Checkpoints NextStep",
        ),
        (
            replace(
                spaced(),
                health=HealthConfig(
                    hang_minutes=0.0, slow_ranks=SlowRankConfig(every_steps=0), compare_replicas_every_steps=5
                ),
            ),
            False,
            "Evaluations Replicas Checkpoints",
        ),
    ],
    ids=["observed", "not observed", "another rank", "dense", "with trackers", "other health"],
)
def test_a_run_does_what_its_configuration_asks_for(make: Any, config: RunConfig, is_main: bool, kinds: str) -> None:
    """Counters of what is never observed would take memory."""
    assert [
        type(callback).__name__ for callback in default_callbacks(make(config, is_main=is_main).run)
    ] == kinds.split()
