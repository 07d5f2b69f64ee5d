"""A run whose step, checkpoints, evaluation and observation of the memory are stand-ins, with its configuration."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import pretrain.train.loop as loop
from megamem.config.model import ModelConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.checkpoint.saver import Saver, SaveReport
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from pretrain.engine.gradient_norms import GradientNorms
from pretrain.engine.save_progress import SaveProgress
from pretrain.engine.step import LossSum, StepResult
from pretrain.state import RunState
from pretrain.train.callbacks import default_callbacks
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
        log: events in order.
        steps: the calls of the step.
        skipped: steps (from 1) without a finite gradient.
        asked: the step (from 1) on which some rank was told to stop.
        asked_in_evaluation: step, and pass of its evaluation (from 1), in which this rank was.
        weights_are_complete: since the last step.
    """

    run: Run
    log: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    asked: int = 0
    asked_in_evaluation: tuple[int, int] = (0, 0)
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
    def progress(self) -> SaveProgress:
        return SaveProgress(done=self.in_flight is not None)

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


def spaced(*, rows: int = 1, usage: int = 0, evaluation: int = 0, checkpoint: int = 0) -> RunConfig:
    """Configuration with intervals in steps."""
    return replace(
        CONFIG,
        logging=LoggingConfig(every_steps=rows, memory_every_steps=usage),
        evaluation=EvaluationConfig(every_steps=evaluation),
        checkpoint=CheckpointConfig(every_steps=checkpoint),
    )
