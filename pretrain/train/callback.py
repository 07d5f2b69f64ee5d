"""Callbacks: a run's work besides training. The loop knows this file alone."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

from pretrain.checkpoint.saver import SaveReport
from pretrain.evaluation.evaluate import Evaluation
from pretrain.run.history import Incident
from pretrain.train.run import Run

# A step's metrics by name; `memory` holds those of each memory layer by block number.
Row: TypeAlias = dict[str, Any]


class Priority(IntEnum):
    """Place of a callback among the others, which a hook goes through from the lowest up.

    An evaluation comes behind the step's row and before its checkpoint, so that a resumed run neither repeats nor misses one;
    a comparison of replicas comes before the checkpoint that would keep what differs; and an end is recorded when all is
    saved.
    """

    WATCH = 0
    GUARD = 1
    MEASURE = 2
    JUDGE = 3
    WRITE = 4
    EVALUATE = 5
    COMPARE = 6
    SAVE = 7
    RECORD = 8
    RELEASE = 9


class Callback:
    """Hooks of the training loop, called on every rank in the order of priorities. By default they do nothing.

    Attributes:
        priority: place among the callbacks of a run; those of one priority keep the order in which they are given.
        callbacks: all of the run. What saves, evaluates or notices something calls their hooks.
    """

    priority: ClassVar[Priority] = Priority.RECORD
    callbacks: Callbacks

    def on_start(self, run: Run) -> None:
        """Act before the first step, and after a checkpoint was restored."""

    def on_step(self, run: Run, row: Row) -> None:
        """Act after a step, which `run.state` already counts. A callback may add to `row`, the step's metrics."""

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Act after an evaluation. One that a stop had passed over comes before `on_start` of higher priorities."""

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


class Callbacks(Callback):
    """All callbacks of a run as one, in the order of their priorities."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = sorted(callbacks, key=attrgetter("priority"))
        for callback in self._callbacks:
            callback.callbacks = self

    def on_start(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.on_start(run)

    def on_step(self, run: Run, row: Row) -> None:
        for callback in self._callbacks:
            callback.on_step(run, row)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        for callback in self._callbacks:
            callback.on_evaluation(run, evaluation)

    def on_save(self, run: Run, report: SaveReport) -> None:
        for callback in self._callbacks:
            callback.on_save(run, report)

    def on_incident(self, run: Run, incident: Incident) -> None:
        for callback in self._callbacks:
            callback.on_incident(run, incident)

    def on_rewind(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.on_rewind(run)

    def on_end(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.on_end(run)

    def on_failure(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.on_failure(run)
