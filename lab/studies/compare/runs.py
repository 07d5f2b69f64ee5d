"""Training the runs of a comparison, one after the other, and reading what they reached."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pretrain.checkpoint.newest import newest_complete
from pretrain.config.loader import config_changes
from pretrain.config.schema import RunConfig
from pretrain.errors import CheckpointError, DataError
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import saved_config, starting_checkpoint
from tools.common.metrics import Curves, curves, read_metrics
from tools.common.ranks import run_on_ranks
from tools.train import train_rank

# Keys that may have changed since a run was made, because they move no loss but by rounding.
_FREE_KEYS = ("name", "parallel.", "checkpoint.", "logging.", "data.num_workers", "train.kernel")


class RunStopped(Exception):
    """A run did not come to its end; its error is on the screen.

    Attributes:
        exit_code: exit code of the run.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True)
class RunResult:
    """Results of a finished run.

    Attributes:
        validation_loss: loss of the last evaluation, in nats per token.
        bits_per_byte: bits per byte of the last evaluation.
        curves: its course.
        step_s: seconds of every step.
    """

    validation_loss: float
    bits_per_byte: float
    curves: Curves
    step_s: tuple[float, ...] = ()


def read_result(metrics: Path, config: RunConfig) -> RunResult | None:
    """Results of a run; None if it has not been evaluated after its last step."""
    rows = read_metrics(metrics)
    evaluations = [row for row in rows if row.get("validation_loss") is not None]
    course = curves(rows)
    if not course.training or not evaluations or evaluations[-1]["step"] < config.train.num_steps:
        return None
    last = evaluations[-1]
    step_s = tuple(row["step_s"] for row in rows if row.get("step_s") is not None)
    return RunResult(last["validation_loss"], last["bits_per_byte"], course, step_s)


class Trainer:
    """Trains runs, keeps what is finished, and says how long the rest takes."""

    def __init__(self, num_ranks: int, *, num_runs: int, num_steps: int) -> None:
        """Start with so many runs to come, of so many steps together."""
        self._num_ranks = num_ranks
        self._num_runs, self._steps_to_go = num_runs, num_steps
        self._num_started = 0
        self._steps_done, self._seconds = 0, 0.0

    def skip(self, num_runs: int, num_steps: int) -> None:
        """Leave out so many of the runs to come, of so many steps each."""
        self._num_runs -= num_runs
        self._steps_to_go -= num_runs * num_steps

    def train(self, config: RunConfig, path: Path, what: str, *, start: Path | None = None) -> RunResult:
        """Train one run to its end, unless it is there.

        Args:
            path: the run's folder.
            what: the run in words.
            start: the run's folder that it begins from; None: it begins anew.

        Raises:
            CheckpointError: the folder holds a run of something else.
            RunStopped: the run did not come to its end.
        """
        folder = RunFolder(path)
        steps_left = config.train.num_steps - finished_steps(config, folder)
        self._num_started += 1
        place = f"run {self._num_started} of {self._num_runs}: {what}"
        if steps_left <= 0:
            print(f"{place}: finished", flush=True)
        else:
            remaining = time_left(self._steps_done, self._seconds, self._steps_to_go)
            print(f"{place}: {steps_left} steps to go; {remaining} for this and the runs after it", flush=True)
            before = starting_checkpoint(start, folder)
            folder.make()
            started = time.monotonic()
            train_it = partial(train_rank, [config], folder, before, quiet=True)
            code = run_on_ranks(train_it, self._num_ranks, log_dir=folder.logs)
            if code != 0:
                raise RunStopped(code)
            self._steps_done, self._seconds = self._steps_done + steps_left, self._seconds + time.monotonic() - started
        self._steps_to_go -= config.train.num_steps
        result = read_result(folder.metrics, config)
        if result is None:
            raise DataError(
                f"{folder.metrics} lacks the evaluation after step {config.train.num_steps}: remove {path} to train "
                "this run again"
            )
        return result


def finished_steps(config: RunConfig, folder: RunFolder) -> int:
    """Steps of a run's newest checkpoint; 0 without one.

    Raises:
        CheckpointError: the folder holds a run of something else.
    """
    saved, _ = newest_complete(folder.checkpoints)
    if saved is None:
        return 0
    differences = config_changes(saved_config(saved, None), config)
    changes = [text for key, text in differences.items() if not key.startswith(_FREE_KEYS)]
    if changes:
        raise CheckpointError(
            f"{folder.path} holds a run of another comparison: {'; '.join(changes)}. Set it back, or use another "
            "--run-dir"
        )
    return saved.step


def time_left(steps_done: int, seconds: float, steps_to_go: int) -> str:
    """Time that the rest takes at the mean speed so far, in words."""
    if steps_done == 0:
        return "time not known yet"
    minutes = seconds / steps_done * steps_to_go / 60
    return f"about {minutes:.0f} min" if minutes >= 1 else "less than a minute"
