"""Status of a run's jobs: what its folder records, and what Slurm says where it can be asked."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pretrain.errors import UserError
from pretrain.run.folder import RunFolder
from pretrain.run.history import Start, read_history
from slurm.commands import JobState, is_there, job_state
from slurm.policy import Action
from slurm.records import AttemptFolder, JobsFolder, submitted_last

# So begins what a job's script leaves in Slurm's comment.
_OURS = "megamem: "


class JobPhase(StrEnum):
    """Phase of a run's jobs."""

    QUEUED = "queued"
    STARTING = "starting"
    """A job runs, and its ranks have not come to train yet."""
    RUNNING = "running"
    """A job runs whose ranks have begun to train, or that Slurm is ending."""
    ENDED = "ended"
    CANCELLED = "cancelled"
    """Ended, by a person."""
    UNKNOWN = "unknown"
    """Slurm cannot be asked."""


@dataclass(frozen=True)
class JobsStanding:
    """Standing of a run's jobs.

    Attributes:
        phase: phase of the jobs of the last submission.
        detail: jobs, state, attempts and the last decision, in words.
    """

    phase: JobPhase
    detail: str


@dataclass(frozen=True)
class _Link:
    """The newest job of a run, or of one of its stages.

    Attributes:
        state: None if Slurm does not know it any more.
        answered: Slurm could be asked.
    """

    jobs: JobsFolder
    state: JobState | None
    answered: bool

    @property
    def waits(self) -> bool:
        return self.state is not None and self.state.waits

    @property
    def is_over(self) -> bool:
        return self.answered and (self.state is None or self.state.is_over)

    @property
    def has_log(self) -> bool:
        return self.jobs.log_of(self.jobs.job_ids()[-1]).exists()

    def __str__(self) -> str:
        return f"job {self.jobs.job_ids()[-1]}{_of_stage(self.jobs)} {self._described_state()}".rstrip()

    def _described_state(self) -> str:
        if not self.answered:
            return "(Slurm does not answer)" if is_there() else ""
        if self.state is None:
            return "is over"
        word = self.state.state.lower()
        return f"{word} ({self.state.reason})" if self.waits else word


def jobs_standing(folder: RunFolder) -> JobsStanding | None:
    """Standing of a run's jobs; None if it was never submitted.

    Raises:
        ConfigError: a record is damaged.
    """
    links = [_ask(jobs) for jobs in submitted_last(folder) if jobs.job_ids()]
    if not links:
        return None
    begun = [(link, last) for link in links if (last := _last_attempt(link.jobs)) is not None]
    # The links of a chain come one after the other.
    link, last = begun[-1] if begun else (links[0], None)
    phase = _phase(folder, links, last)
    words = [str(each) for each in links]
    if last is not None:
        words.append(f"attempt {int(last.path.name)}" + _of_stage(link.jobs))
    if phase not in (JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RUNNING):
        words += _what_followed(link, last, is_last=link is links[-1])
    return JobsStanding(phase, ", ".join(words))


def _phase(folder: RunFolder, links: Sequence[_Link], last: AttemptFolder | None) -> JobPhase:
    """Phase of all the jobs together.

    Args:
        last: attempt of the links.
    """
    running = [link for link in links if link.answered and not link.waits and not link.is_over]
    if running:
        ends = running[0].state is not None and running[0].state.state == "COMPLETING"
        if last is None or last.attempt().job not in running[0].jobs.job_ids():
            # It has no attempt yet; the last one is of the stage before it.
            return JobPhase.RUNNING if ends else JobPhase.STARTING
        if (decision := last.decision()) is not None:
            starts_again = JobPhase.QUEUED if ends else JobPhase.STARTING
            return starts_again if decision.action is Action.REQUEUE else JobPhase.ENDED
        if ends:
            return JobPhase.RUNNING
        began = datetime.fromisoformat(last.attempt().at)
        starts = [event for event in read_history(folder) if isinstance(event, Start)]
        return JobPhase.RUNNING if starts and datetime.fromisoformat(starts[-1].at) >= began else JobPhase.STARTING
    if any(link.waits for link in links):
        return JobPhase.QUEUED
    if any(link.state is not None and link.state.state.startswith("CANCELLED") for link in links) or any(
        link.jobs.cancelled.exists() for link in links
    ):
        return JobPhase.CANCELLED
    # Of jobs that never began, and that Slurm has forgotten, nobody knows why.
    knows = last is not None or any(link.state is not None or link.has_log for link in links)
    return JobPhase.ENDED if knows and all(link.answered for link in links) else JobPhase.UNKNOWN


def _what_followed(link: _Link, last: AttemptFolder | None, *, is_last: bool) -> list[str]:
    """The last decision, and what came of it.

    Args:
        is_last: no job of another stage was to follow.
    """
    said = "" if link.state is None else link.state.comment
    words = [said] if said.startswith(_OURS) else []
    decision = None if last is None else last.decision()
    if decision is None:
        return words
    assert last is not None
    if decision.action is Action.STOP:
        return [f"not started again: {decision.reason}", *words]
    if decision.action is Action.DONE and is_last:
        return [f"done: {decision.reason}"]
    if not link.is_over:
        return [f"{decision.action}: {decision.reason}"]
    refused = f" ({refused})" if (refused := last.refused()) else ""
    which = (
        f"the stage after {_of_stage(link.jobs)[len(' of stage ') :]}" if decision.action is Action.DONE else "the run"
    )
    return [decision.reason, *words, f"{which} is not started again{refused}: `{_again(link.jobs)}` goes on"]


def _again(jobs: JobsFolder) -> str:
    """The command that goes on with a run."""
    command = ["megamem", "submit", str(jobs.config), "--cluster", str(jobs.profile), "--run-dir", str(jobs.run.path)]
    return shlex.join([*command, *(["--chain"] if jobs.link is not None else [])])


def _of_stage(jobs: JobsFolder) -> str:
    submission = jobs.submission()
    return "" if submission is None or submission.stage is None else f" of stage {submission.stage}"


def _last_attempt(jobs: JobsFolder) -> AttemptFolder | None:
    """Newest attempt of the last submission; None without any."""
    submission = jobs.submission()
    assert submission is not None
    return next(
        (each for each in reversed(jobs.attempt_folders()) if each.attempt().submission == submission.number), None
    )


def _ask(jobs: JobsFolder) -> _Link:
    if is_there():
        try:
            return _Link(jobs, job_state(jobs.job_ids()[-1]), answered=True)
        except UserError:
            pass
    return _Link(jobs, None, answered=False)
