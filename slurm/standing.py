"""How the jobs of a run stand: what its folder records, and what Slurm says where it can be asked."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.errors import UserError
from pretrain.folder import RunFolder
from slurm.commands import is_there, job_state
from slurm.policy import Action
from slurm.records import AttemptFolder, JobsFolder, submitted_last


@dataclass(frozen=True)
class JobsStanding:
    """Attributes:
    waits: a job of the run is queued, or being started.
    detail: jobs, state, attempts and the last decision, in words.
    """

    waits: bool
    detail: str


def jobs_standing(folder: RunFolder) -> JobsStanding | None:
    """How a run's jobs stand; None if it was never submitted.

    Raises:
        ConfigError: a record is damaged.
    """
    links = [jobs for jobs in submitted_last(folder) if jobs.job_ids()]
    if not links:
        return None
    asked = [_asked(jobs.job_ids()[-1]) for jobs in links]
    words = [_job_in_words(jobs, state) for jobs, (state, _) in zip(links, asked, strict=True)]
    runs = any(state == "running" for state, _ in asked)
    waits = not runs and any(waits for _, waits in asked)
    begun = [(jobs, last) for jobs in links if (last := _last_attempt(jobs)) is not None]
    if begun:
        # The links of a chain come one after the other.
        jobs, last = begun[-1]
        words.append(f"attempt {int(last.path.name)}" + _of_stage(jobs))
        if (decision := last.decision()) is not None and not waits and not runs:
            ended = decision.action is Action.STOP
            words.append(f"{'not started again' if ended else decision.action.value}: {decision.reason}")
    return JobsStanding(waits, ", ".join(words))


def _job_in_words(jobs: JobsFolder, state: str) -> str:
    return f"job {jobs.job_ids()[-1]}{_of_stage(jobs)} {state}".rstrip()


def _of_stage(jobs: JobsFolder) -> str:
    submission = jobs.submission()
    return "" if submission is None or submission.stage is None else f" of stage {submission.stage}"


def _last_attempt(jobs: JobsFolder) -> AttemptFolder | None:
    """Of the last submission."""
    submission = jobs.submission()
    assert submission is not None
    return next(
        (each for each in reversed(jobs.attempt_folders()) if each.attempt().submission == submission.number), None
    )


def _asked(job: str) -> tuple[str, bool]:
    """A job's state in words, and whether it waits."""
    if not is_there():
        return "", False
    try:
        state = job_state(job)
    except UserError:
        return "(Slurm does not answer)", False
    if state is None:
        return "is over", False
    waits = state.state in ("PENDING", "CONFIGURING", "REQUEUED")
    return f"{state.state.lower()} ({state.reason})" if waits else state.state.lower(), waits
