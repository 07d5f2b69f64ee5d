"""Steps that do not end: which part of a run is awaited, and for how long."""

from __future__ import annotations

import os

from parallel.processes.hang_watch import GRACE_S, HangWatch
from pretrain.checkpoint.saver import SaveReport
from pretrain.config.schema import RunConfig
from pretrain.run.history import Incident
from pretrain.train.callback import Callback, Priority, Row
from pretrain.train.run import Run


def hang_limit_s(config: RunConfig) -> float:
    """Seconds that a step may take; 0: any."""
    minutes = config.health.hang_minutes
    return 60 * (config.parallel.timeout_minutes / 2 if minutes is None else minutes)


class Hangs(Callback):
    """Watch over what is no plain step: the first one, and all that comes between two steps.

    Every rank has its own watch. It remembers whether there is a checkpoint to go on from, and does not look it up: the
    disk may be what hangs.
    """

    priority = Priority.WATCH

    def __init__(self, run: Run) -> None:
        self._step_s = hang_limit_s(run.config)
        self._long_s = 60 * run.config.health.long_phase_minutes
        self._has_checkpoint = False
        stacks = run.folder.logs / f"stacks_rank_{run.groups.rank}.txt"
        self._watch = HangWatch(stacks, run.groups.rank, verdict=self._verdict, grace_s=GRACE_S)

    def on_start(self, run: Run) -> None:
        self._has_checkpoint = run.last_saved_step is not None
        self._watch.expect("the first step", self._long_s)

    def on_step(self, run: Run, row: Row) -> None:
        self._watch.expect(f"what comes after step {run.state.step} (evaluation, save)", self._long_s)

    def on_incident(self, run: Run, incident: Incident) -> None:
        # The run may go back to a checkpoint, which it has to read.
        self._watch.expect(f"what comes after a {incident.kind} in step {incident.step}", self._long_s)

    def on_save(self, run: Run, report: SaveReport) -> None:
        self._has_checkpoint = True

    def on_end(self, run: Run) -> None:
        self._watch.expect("the end of the run (save)", self._long_s)

    def on_failure(self, run: Run) -> None:
        self._watch.stop()

    def next_step(self, run: Run) -> None:
        """Expect a plain step: all that came after the last one is done."""
        self._watch.expect(f"step {run.state.step + 1}", self._step_s)

    def stop(self) -> None:
        """Stop the watch: the run has ended."""
        self._watch.stop()

    def _verdict(self) -> tuple[str, int]:
        if self._has_checkpoint:
            return "Start the run again: it goes on from its newest checkpoint", os.EX_TEMPFAIL
        return "There is no checkpoint to go on from yet: look at the stacks before you start the run again", 1


class NextStep(Callback):
    """Tell the watch when a plain step begins."""

    priority = Priority.RELEASE

    def __init__(self, hangs: Hangs) -> None:
        self._hangs = hangs

    def on_step(self, run: Run, row: Row) -> None:
        self._hangs.next_step(run)

    def on_rewind(self, run: Run) -> None:
        self._hangs.next_step(run)

    def on_end(self, run: Run) -> None:
        self._hangs.stop()
