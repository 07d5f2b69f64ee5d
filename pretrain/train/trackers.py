"""Rows of steps and evaluations, in the run's file and in trackers."""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallel.machine.atomic_write import atomic_write
from parallel.machine.refusals import naming
from pretrain.checkpoint.folder import list_checkpoints
from pretrain.checkpoint.saver import SaveReport
from pretrain.config.loader import to_dict
from pretrain.evaluation.evaluate import Evaluation
from pretrain.run.metric_rows import NumberedRow, numbered_rows
from pretrain.train.callback import Callback, Priority, Row
from pretrain.train.run import Run


def observes_usage(run: Run, step: int) -> bool:
    """Tell whether the use of the memory is observed on this step (counted from 1)."""
    every = run.config.logging.memory_every_steps
    return run.config.model.memory is not None and every > 0 and step > 0 and step % every == 0


class RowWriter(Callback, ABC):
    """Writer of the rows of steps that are logged, and those of evaluations. Rank 0 only."""

    priority = Priority.WRITE

    def on_step(self, run: Run, row: Row) -> None:
        step, settings = run.state.step, run.config.logging
        if step % settings.every_steps == 0 or step == run.config.train.num_steps or observes_usage(run, step):
            self.write(row)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        self.write({"step": run.state.step, **evaluation_row(evaluation)})

    @abstractmethod
    def write(self, row: Row) -> None:
        """Keep a row, which names its step."""


class MetricsFile(RowWriter):
    """`metrics.jsonl`: one object per step and per evaluation, with full precision.

    A resumed run first drops rows of steps past its checkpoint, so that the file reads as that of an uninterrupted run;
    so does one that goes back. The file of a run that has no checkpoint yet is set aside: its rows are all that is left
    of those steps.
    """

    def on_start(self, run: Run) -> None:
        self._path = run.folder.metrics
        stage = run.config.stage
        self._of_stage: Row = {} if stage is None else {"stage": stage.name}
        rows = list(numbered_rows(self._path, step=int))
        last = max((row.values["step"] for row in rows), default=0)
        if last > run.state.step and not list_checkpoints(run.folder.checkpoints):
            aside = self._set_aside()
            print(
                f"note: {run.folder.path} has rows of {last:,} steps and no checkpoint: the run was ended before its first "
                f"one was complete. It starts again at step {run.state.step:,}; those rows are in {aside.name}",
                file=sys.stderr,
                flush=True,
            )
        self._keep(rows, run.state.step)

    def on_rewind(self, run: Run) -> None:
        self._keep(list(numbered_rows(self._path, step=int)), run.state.step)

    def _set_aside(self) -> Path:
        """Give the file a second name, `metrics-1.jsonl` or the next free one, under which it stays as it is."""
        for number in itertools.count(1):
            aside = self._path.with_stem(f"{self._path.stem}-{number}")
            if not os.path.lexists(aside):
                break
        shutil.copyfile(self._path, aside)
        return aside

    def _keep(self, rows: list[NumberedRow], last_step: int) -> None:
        with atomic_write(self._path) as stream:
            stream.writelines(row.line + b"\n" for row in rows if row.values["step"] <= last_step)

    def on_save(self, run: Run, report: SaveReport) -> None:
        self.write(
            {
                "step": report.step,
                "save_stall_s": report.stall_s,
                "save_s": report.save_s,
                "save_bytes": report.num_bytes,
            }
        )

    def write(self, row: Row) -> None:
        try:
            with naming(self._path), open(self._path, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(_finite(self._of_stage | row), allow_nan=False) + "\n")
        except OSError as error:
            error.add_note("Checkpoints are intact, and the run goes on from the newest one")
            raise


def evaluation_row(evaluation: Evaluation) -> Row:
    """The metrics of an evaluation by their names in files and trackers; `domains` holds those of each, if there are
    several.
    """
    row: Row = {
        "validation_loss": evaluation.loss,
        "bits_per_byte": evaluation.bits_per_byte,
        "validation_tokens": evaluation.num_tokens,
        "validation_bytes": evaluation.num_bytes,
    }
    if evaluation.by_domain:
        row["domains"] = {name: evaluation_row(part) for name, part in evaluation.by_domain.items()}
    return row


def scalars(row: Row, prefix: str = "") -> Iterator[tuple[str, float | int]]:
    """A row's numbers by path, as in `memory/3/singular_values/0/1`, for trackers that know no nesting."""
    for name, value in row.items():
        if isinstance(value, list):
            value = {str(index): part for index, part in enumerate(value)}
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard(RowWriter):
    """Scalars in TensorBoard event files."""

    def on_start(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder.tensorboard), purge_step=run.state.step + 1)

    def on_rewind(self, run: Run) -> None:
        self._writer.close()
        self.on_start(run)

    def write(self, row: Row) -> None:
        for name, value in scalars(row):
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def on_end(self, run: Run) -> None:
        self._writer.close()


class WandB(RowWriter):
    """Weights & Biases, online or offline; a run that goes on, or goes back, goes on in the same one.

    Its own count of steps cannot go back, so a row's step is a value like the others, against which all are drawn. Rows
    of steps that are taken again come twice there, and the later one is the run's.
    """

    _run: Any = None

    def on_start(self, run: Run) -> None:
        import wandb

        settings = run.config.logging
        run.folder.logs.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=settings.wandb_project,
            name=run.config.name,
            dir=str(run.folder.logs),
            mode=settings.wandb_mode,
            config=to_dict(run.config),
            id=_wandb_id(run.folder.wandb_id),
            # Offline it means nothing: `wandb sync --append` joins what has the same id.
            resume="allow" if settings.wandb_mode == "online" else None,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        self._run.log(dict(scalars(row)))

    def on_end(self, run: Run) -> None:
        self._run.finish()

    def on_failure(self, run: Run) -> None:
        # The logged rows are sent off; the run is shown as failed until it goes on.
        if self._run is not None:
            self._run.finish(exit_code=1)


def _wandb_id(path: Path) -> str:
    """The id of a run there, made when it starts for the first time."""
    if not path.exists():
        with atomic_write(path) as stream:
            stream.write(secrets.token_hex(8).encode())
    return path.read_text(encoding="ascii").strip()
