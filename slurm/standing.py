"""How the jobs of a run stand: what its folder records, and what Slurm says where it can be asked."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.errors import UserError
from pretrain.folder import RunFolder
from slurm.commands import is_there, job_state
from slurm.policy import Action
from slurm.records import JobsFolder


@dataclass(frozen=True)
class JobsStanding:
    """Attributes:
    waits: a job of the run is queued, or being started.
    detail: job, state, attempts and the last decision, in words.
    """

    waits: bool
    detail: str


def jobs_standing(folder: RunFolder) -> JobsStanding | None:
    """How a run's jobs stand; None if it was never submitted.

    Raises:
        ConfigError: a record is damaged.
    """
    jobs = JobsFolder(folder)
    submission, ids = jobs.submission(), jobs.job_ids()
    if submission is None or not ids:
        return None
    state, waits = _asked(ids[-1])
    words = [f"job {ids[-1]} {state}".rstrip()]
    last = next(
        (each for each in reversed(jobs.attempt_folders()) if each.attempt().submission == submission.number), None
    )
    if last is not None:
        words.append(f"attempt {int(last.path.name)}")
        if (decision := last.decision()) is not None and not waits:
            ended = decision.action is Action.STOP
            words.append(f"{'not started again' if ended else decision.action.value}: {decision.reason}")
    return JobsStanding(waits, ", ".join(words))


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
