"""Base class of a run's work besides training. The loop knows it alone."""

from __future__ import annotations

from typing import Any, TypeAlias

from pretrain.checkpoint.saver import SaveReport
from pretrain.evaluation.evaluate import Evaluation
from pretrain.run.history import Incident
from pretrain.train.run import Run

# A step's metrics by name; `memory` holds those of each memory layer by block number.
Row: TypeAlias = dict[str, Any]


class Callback:
    """Hooks of the training loop, called on every rank in the order of the callbacks. By default they do nothing."""

    def on_start(self, run: Run) -> None:
        """Act before the first step, and after a checkpoint was restored."""

    def on_step(self, run: Run, row: Row) -> None:
        """Act after a step, which `run.state` already counts. A callback may add to `row`, the step's metrics."""

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Act after an evaluation."""

    def on_save(self, run: Run, report: SaveReport) -> None:
        """Act after a checkpoint is complete, which may be some steps after its own."""

    def on_incident(self, run: Run, incident: Incident) -> None:
        """Act after something was noticed that people should know of, and before the row of its step."""

    def on_rewind(self, run: Run) -> None:
        """Act after the run went back to a checkpoint: the steps past `run.state` are to be forgotten."""

    def on_end(self, run: Run) -> None:
        """Act after the last step, or before an early stop; not after an error."""

    def on_failure(self, run: Run) -> None:
        """Act after an error, perhaps of this rank alone and before `on_start`: ask nothing of other ranks any more."""
