"""Putting runs into Slurm's queue: as one job, as a chain with a job for each stage, or as an array of runs.

All that a job reads is written before it is queued, and a chain or an array is queued as a whole or not at all.
"""

from __future__ import annotations

import os
import shlex
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.folder import SavedState
from pretrain.config.loader import to_yaml
from pretrain.config.schema import RunConfig
from pretrain.config.source import dump_yaml
from pretrain.config.stages import stage_called, to_entries
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.history import now
from pretrain.run.owner import look, owned
from pretrain.run.saved_run import record_start
from slurm.commands import cancel, job_state, release, submit
from slurm.lead import lead_seconds
from slurm.profile import ClusterConfig
from slurm.records import JobsFolder, Submission, jobs_folders
from slurm.script import render, render_array
from slurm.snapshot import code_hash, take_snapshot


@dataclass(frozen=True)
class QueuedJob:
    """A job that can be queued.

    Attributes:
        records: the folder of the files that the job reads.
        stages: configurations of the whole run's stages, or its one configuration.
        profile: profile of the cluster, with the job's own nodes and time limit.
        submission: the request.
        start: the checkpoint that the run goes on from while it has none of its own.
    """

    records: JobsFolder
    stages: tuple[RunConfig, ...]
    profile: ClusterConfig
    submission: Submission
    start: SavedState | None = None

    @property
    def trained(self) -> tuple[RunConfig, ...]:
        """The stages that it trains."""
        stage = self.submission.stage
        return self.stages if stage is None else (stage_called(self.stages, stage),)

    @property
    def script(self) -> str:
        """For sbatch."""
        return render(self.trained, self.profile, self.submission, self.records, time=self.profile.time)


def job_of_run(
    records: JobsFolder,
    stages: Sequence[RunConfig],
    profile: ClusterConfig,
    cluster: str,
    stage: str | None = None,
    start: SavedState | None = None,
) -> QueuedJob:
    """The next job of a run, or of one of its stages.

    Args:
        cluster: name of the profile.
        start: the checkpoint that the run goes on from while it has none of its own.
    """
    before = [submission.number for jobs in jobs_folders(records.run) if (submission := jobs.submission()) is not None]
    submission = Submission(
        number=1 + max(before, default=0),
        cluster=cluster,
        nodes=profile.nodes,
        ranks_per_node=profile.ranks_per_node,
        code=code_hash(),
        lead_s=lead_seconds(records.run.metrics, profile.lead_s),
        at=now(),
        stage=stage,
    )
    return QueuedJob(records, tuple(stages), profile, submission, start)


def check_free(jobs: Sequence[JobsFolder]) -> None:
    """Refuse a run that runs, or waits to.

    Args:
        jobs: all records of the run.

    Raises:
        ConfigError: the run runs or waits; the message names its job or process, and how to end it.
    """
    for records in jobs:
        run, named = records.run, shlex.quote(str(records.run.path))
        for job in reversed(records.job_ids()):
            state = job_state(job)
            if state is not None and not state.is_over:
                raise ConfigError(
                    f"job {job} of {run.path} is {state.state.lower()}: `megamem status {named}` shows it, and "
                    f"`megamem cancel {named}` ends it"
                )
        presence = look(run)
        if presence is not None and not presence.ended and presence.alive:
            raise ConfigError(f"{run.path} is in use by {presence.claim}: stop it, or use another --run-dir")


@contextmanager
def submitting(run: RunFolder) -> Iterator[None]:
    """Be the only one who submits a run, or the sweep in a folder, until the block ends.

    Raises:
        ConfigError: somebody else submits, and is named.
    """
    # A claim of its own: that of the run is for the job, which may begin before this block ends.
    with owned(
        RunFolder(run.path / "slurm"), "{folder} is being submitted by {owner}: `megamem status` tells of its job"
    ):
        yield


def queue_job(job: QueuedJob) -> str:
    """Queue a run as one job. Returns its number."""
    write(job)
    number = submit(job.records.script)
    job.records.add_job(number, "submitted")
    return number


def queue_chain(links: Sequence[QueuedJob]) -> list[str]:
    """Queue a job for each stage that is left, each of which waits for the success of the one before it.

    The first is held until all are there: so none begins whose followers were refused, and each finds the number of the
    job behind it, whose dependency it changes should it have to queue itself as another job.

    Returns:
        Their numbers.

    Raises:
        SlurmError: a job was refused; none is left in the queue.
    """
    numbers: list[str] = []
    for link in links:
        write(link)
    try:
        for link in links:
            # Without the second option a job whose turn never comes would wait for ever.
            waits = [f"--dependency=afterok:{numbers[-1]}", "--kill-on-invalid-dep=yes"] if numbers else ["--hold"]
            numbers.append(submit(link.records.script, waits))
            link.records.add_job(numbers[-1], "submitted")
        release(numbers[0])
    except BaseException:
        for number in reversed(numbers):
            cancel(number)
        raise
    return numbers


def queue_array(jobs: Sequence[QueuedJob], name: str, folder: Path, at_once: int | None) -> str:
    """Queue runs of one shape as an array. Each run decides by itself what follows after each of its attempts.

    Args:
        name: name of the array.
        folder: folder for its script.
        at_once: most of them that run at the same time; None: no limit.

    Returns:
        The array's number, behind which its members have theirs.
    """
    for job in jobs:
        write(job)
    script = folder / "array.sh"
    first = jobs[0]
    records = [job.records for job in jobs]
    _put(script, render_array(name, records, first.profile, first.submission, folder, at_once), 0o700)
    number = submit(script)
    for place, job in enumerate(jobs):
        job.records.add_job(f"{number}_{place}", "submitted")
    return number


def write(job: QueuedJob) -> None:
    """Put down all that a job reads, the script last."""
    records, run, stages = job.records, job.records.run, job.stages
    run.make()
    records.path.mkdir(parents=True, exist_ok=True)
    records.cancelled.unlink(missing_ok=True)
    take_snapshot(records.code)
    staged = stages[0].stage is not None
    records.config.write_text(dump_yaml(to_entries(stages)) if staged else to_yaml(stages[0]), encoding="utf-8")
    if job.start is not None and not run.start.exists():
        # By which the ranks know it, and every later submission.
        record_start(run, job.start)
    if not run.config.exists():
        # So that `megamem status` finds a run that still waits.
        run.config.write_text(to_yaml(stages[0]), encoding="utf-8")
    _put(records.profile, to_yaml(job.profile), 0o600)
    records.write_submission(job.submission)
    _put(records.script, job.script, 0o700)


def _put(path: Path, text: str, mode: int) -> None:
    """Write a file that is never open to more people than it is meant for, and that others see whole."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(temporary, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
        stream.write(text)
    temporary.replace(path)
