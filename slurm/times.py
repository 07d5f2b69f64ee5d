"""Times that a run's attempts took to train, and the losses of each, from the records of its jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from pretrain.run.folder import RunFolder
from pretrain.run.history import Start, read_history
from slurm.records import AttemptFolder, JobsFolder, jobs_folders


@dataclass(frozen=True)
class AttemptTimes:
    """Times of one attempt; each is None if it did not happen, or was not recorded.

    Attributes:
        stage: name of the stage that its job trained, as a link of a chain.
        number, job, num_nodes: the attempt's number, its job and its nodes.
        cause: cause of its end.
        waited_s: seconds in the queue: since the job was queued, or since the attempt before it ended.
        start_s: seconds from its first command to its first step: importing, the check of the nodes, building,
            restoring.
        down_s: seconds from the last step or save of the attempt before it to its own first step.
        lost_steps: steps that it took, and no checkpoint has.
    """

    stage: str | None
    number: int
    job: str
    num_nodes: int
    cause: str | None
    waited_s: float | None
    start_s: float | None
    down_s: float | None
    lost_steps: int | None


def attempt_times(run: RunFolder) -> list[AttemptTimes]:
    """Every attempt of a run, those of a chain's links one after the other.

    Raises:
        ConfigError: a record is damaged.
    """
    starts = [_at(event.at) for event in read_history(run) if isinstance(event, Start)]
    return [each for jobs in jobs_folders(run) for each in _of_jobs(jobs, starts)]


def _of_jobs(jobs: JobsFolder, starts: list[datetime]) -> Iterator[AttemptTimes]:
    queued = {job: _at(at) for job, at in jobs.job_times()}
    submission = jobs.submission()
    heard_at, ended_at = None, None
    previous: AttemptFolder | None = None
    for folder in jobs.attempt_folders():
        attempt, ended = folder.attempt(), folder.ended()
        began = _at(attempt.at)
        if previous is None or previous.attempt().submission != attempt.submission:
            heard_at, ended_at = None, None
        since = [moment for moment in (queued.get(attempt.job), ended_at) if moment is not None and moment <= began]
        until = ended.at if ended is not None else None
        trained = next((at for at in starts if at >= began and (until is None or at <= _at(until))), None)
        heard = None if ended is None or ended.heard_at is None else _at(ended.heard_at)
        has_trained = trained is not None and heard is not None and heard >= trained
        lost = None
        if ended is not None and has_trained and ended.last_step is not None:
            lost = max(0, ended.last_step - (ended.saved_step or 0))
        yield AttemptTimes(
            stage=None if submission is None else submission.stage,
            number=int(folder.path.name),
            job=attempt.job,
            num_nodes=attempt.num_nodes,
            cause=None if ended is None else ended.cause.value,
            waited_s=(began - max(since)).total_seconds() if since else None,
            start_s=None if trained is None else (trained - began).total_seconds(),
            down_s=None if trained is None or heard_at is None else (trained - heard_at).total_seconds(),
            lost_steps=lost,
        )
        heard_at = heard if has_trained else heard_at
        ended_at = None if until is None else _at(until)
        previous = folder


def _at(text: str) -> datetime:
    return datetime.fromisoformat(text)
