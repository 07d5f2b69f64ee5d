"""Status of a run, by one look at its folder: nothing is written, nothing is waited for, no torch is imported."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from parallel.machine.refusals import describe_error
from pretrain.config.suggest import did_you_mean_path
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.history import End, Start, read_history
from pretrain.run.not_a_run import refuse_configuration
from pretrain.run.owner import LAPSE_S, Presence, look
from slurm.job_status import JobPhase, JobsStanding

State: TypeAlias = Literal[
    "running",
    "silent",
    "queued",
    "starting",
    "ending",
    "finished",
    "stopped",
    "cancelled",
    "failed",
    "killed",
    "new",
    "unknown",
]
_ALIVE = ("running", "silent")


@dataclass(frozen=True)
class Standing:
    """State of a run: what it does, or how it ended.

    Attributes:
        state: running; silent: its owner is on another machine and has not beaten for a minute; queued: its Slurm job
            waits; starting: its job runs, and its ranks do not train yet; ending: they do no longer; finished: all steps
            are done; stopped: as it was asked to, with a checkpoint; cancelled: its job was, and saved nothing for it;
            failed: it ended with an error; killed: its process is gone and never said that it ended; new: it was
            made, and nobody has started it; unknown: from before ends were recorded.
        detail: words on who and since when; empty where there is nothing to say.
        seen: its process was looked for, or it said itself that it has ended.
    """

    state: State
    detail: str = ""
    seen: bool = True

    def with_jobs(self, jobs: JobsStanding) -> Standing:
        """Standing of a run that was submitted to Slurm, whose jobs are told of too."""
        own = "before its first step" if self.state == "new" else self.detail
        return Standing(self._state_with(jobs.phase), ", ".join(filter(None, (own, jobs.detail))))

    def _state_with(self, phase: JobPhase) -> State:
        is_over = phase in (JobPhase.ENDED, JobPhase.CANCELLED)
        if self.state in _ALIVE and (self.seen or not is_over):
            return self.state
        if phase is JobPhase.QUEUED:
            return "queued"
        if phase is JobPhase.STARTING:
            return "starting"
        if self.state in ("finished", "stopped"):
            return self.state
        if phase is JobPhase.RUNNING:
            return "ending"
        if phase is JobPhase.CANCELLED:
            return "cancelled"
        if self.state in _ALIVE:
            return "killed"
        if self.state == "new":
            # It was submitted.
            return "failed" if phase is JobPhase.ENDED else "unknown"
        return self.state

    def __str__(self) -> str:
        return f"{self.state} ({self.detail})" if self.detail else self.state


def standing_of(folder: RunFolder, step: int, num_steps: int | None) -> Standing:
    """Standing of a run.

    Args:
        folder: the run's.
        step: the last one in its metrics.
        num_steps: steps that it is to take; None if that is not known.
    """
    presence = look(folder)
    if presence is not None and not presence.ended:
        return _claimed(presence)
    events = [event for event in read_history(folder) if isinstance(event, Start | End)]
    if num_steps is not None and step >= num_steps and (not events or isinstance(events[-1], End)):
        return Standing("finished")
    if not events:
        return (
            Standing("unknown", "how it ended was not recorded") if step else Standing("new", "nobody has started it")
        )
    last = events[-1]
    return Standing("stopped" if isinstance(last, End) else "failed", f"at step {max(step, last.step)}")


def _claimed(presence: Presence) -> Standing:
    """Standing of a run whose owner did not say that it has ended."""
    who = "somebody" if presence.claim is None else _described_owner(presence)
    # Slurm knows more of its own job than a claim that was made elsewhere.
    seen = presence.alive is not None or presence.claim is None or not presence.claim.job
    if presence.alive or (presence.alive is None and presence.beat_age_s < LAPSE_S):
        return Standing("running", who, seen)
    if presence.alive is None:
        return Standing("silent", f"{who}, no beat for {duration(presence.beat_age_s)}", seen)
    return Standing("killed", who)


def _described_owner(presence: Presence) -> str:
    claim = presence.claim
    assert claim is not None
    job = f", Slurm job {claim.job}" if claim.job else ""
    return f"process {claim.pid} on {claim.host} since {claim.since}{job}"


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3.5 h", "2.1 d"."""
    for unit, size, digits in (("d", 86400.0, 1), ("h", 3600.0, 1), ("min", 60.0, 0)):
        if seconds >= size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def find_runs(path: Path, problems: list[str]) -> list[Path]:
    """The run folders at a path: itself, or all below it that are in no other run, by name.

    Folders that cannot be read are told of in `problems`: there may be runs in them.

    Raises:
        ConfigError: no such folder exists, or no run is in it.
    """
    refuse_configuration(path)
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such folder{did_you_mean_path(path)} Name run folders of `megamem train`, or a folder that holds some"
        )
    num_before = len(problems)
    found = sorted(_runs_below(path, problems))
    if not found and len(problems) == num_before:
        raise ConfigError(f"{path} holds no run: a run's folder has config.yaml, which `megamem train` writes")
    return found


def _runs_below(path: Path, problems: list[str]) -> Iterator[Path]:
    for folder, inner, files in os.walk(path, onerror=lambda error: problems.append(describe_error(error))):
        if RunFolder(path).config.name in files:
            # Folders that a run keeps of its own (replays, checkpoints) are no runs beside it.
            inner.clear()
            yield Path(folder)


def metrics_age_s(folder: RunFolder) -> float | None:
    """Seconds since the metrics were last written; None if there are none."""
    try:
        return max(0.0, time.time() - folder.metrics.stat().st_mtime)
    except FileNotFoundError:
        return None
