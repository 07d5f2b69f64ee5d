"""Answers for the batch script: may this attempt begin, on how many nodes; and what follows from how it ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pretrain.config.schema import RunConfig
from pretrain.config.stages import read_run, stage_called
from pretrain.config.validate import validate
from pretrain.errors import ConfigError, UserError
from pretrain.run.history import now
from pretrain.run.saved_run import recorded_start, starting_point
from slurm.first_failure import failed_node, first_failure
from slurm.lead import last_step, lead_seconds
from slurm.policy import Action, Attempt, Cause, Decision, Ended, cause_of, decide
from slurm.profile import ClusterConfig, load_profile
from slurm.records import AttemptFolder, JobsFolder, Submission

_CANCELLED = "CANCELLED"
# State of a job whose script still runs, but not for long.
_BEING_ENDED = "COMPLETING"
_TIMED_OUT = "TimeLimit"
# The rest of the time limit must hold so many leads, or the ranks would be told to stop as soon as they train.
_LEADS_LEFT = 2


@dataclass(frozen=True)
class JobNow:
    """A job as Slurm sees it while its script decides; empty and None where it did not answer.

    Attributes:
        state: RUNNING, COMPLETING, ...
        reason: cause of its end, where Slurm gives one.
        restarts: number of times that it has been requeued.
        time_left: time until its limit, in Slurm's form.
    """

    state: str = ""
    reason: str = ""
    restarts: int | None = None
    time_left: str = ""

    @classmethod
    def read(cls, text: str) -> JobNow:
        """From the columns of squeue."""
        words = text.split()
        if len(words) != 4 or not words[2].isdecimal():
            return cls()
        return cls(words[0], words[1], int(words[2]), words[3])

    def is_started_again_by_slurm(self, attempt: Attempt) -> bool:
        """True if Slurm has queued it already: a node died, it was preempted, or somebody requeued it."""
        return self.restarts is not None and self.restarts > attempt.restart

    def was_cancelled(self, attempt: Attempt) -> bool:
        """True if somebody has ended it. Slurm itself says why, or counts a restart."""
        ends = self.state == _BEING_ENDED and not self.is_started_again_by_slurm(attempt)
        return self.state == _CANCELLED or (ends and self.reason != _TIMED_OUT)


@dataclass(frozen=True)
class AttemptPlan:
    """Plan of an attempt.

    Attributes:
        folder: the attempt's folder.
        num_nodes: number of the job's nodes on which ranks start.
        stop_after_s: seconds after which the ranks are told to stop; None: Slurm's signal comes early enough.
    """

    folder: AttemptFolder
    num_nodes: int
    stop_after_s: int | None


def begin(jobs: JobsFolder, nodes: Sequence[str], time_left: str, environ: Mapping[str, str]) -> AttemptPlan | None:
    """Begin an attempt; None if another job has taken this one's place, or its stage is done.

    An attempt before it that has left no end was lost with its node, or taken by Slurm: it is concluded here.

    Args:
        nodes: nodes of the job.
        time_left: time until the job's limit, as squeue has it.
        environ: environment of the batch script.

    Raises:
        ConfigError: the run must not start again; the message says why.
    """
    submission = _submission(jobs)
    profile = load_profile(jobs.profile)
    job = job_of(environ)
    newer = [other for other in jobs.job_ids() if _number(other) > _number(job)]
    if newer:
        print(f"job {newer[-1]} goes on with this run, and job {job} has nothing to do", file=sys.stderr)
        return None
    if job not in jobs.job_ids():
        jobs.add_job(job, "began before it was recorded")
    _conclude_lost(jobs, submission, profile)
    stages = stages_of(jobs, submission)
    saved_step = jobs.newest_saved_step()
    if submission.stage is not None and not _is_left_to_train(stages[0], _reached_step(jobs)):
        print(f"stage {submission.stage} is done, and job {job} has nothing to do", file=sys.stderr)
        return None
    bad = bad_nodes(jobs, submission.number) if profile.outlives_nodes else set()
    nodes = [node for node in nodes if node not in bad]
    num_nodes = usable_nodes(stages, profile, len(nodes), submission.nodes)
    attempt = Attempt(
        submission=submission.number,
        job=job,
        restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
        nodes=tuple(nodes[:num_nodes]),
        num_nodes=num_nodes,
        saved_step=saved_step,
        at=now(),
    )
    lead_s = lead_seconds(jobs.run.metrics, profile.lead_s)
    left_s = seconds(time_left)
    stop_after_s = max(1, left_s - lead_s) if left_s is not None and lead_s > submission.lead_s else None
    return AttemptPlan(jobs.begin_attempt(attempt), num_nodes, stop_after_s)


def job_of(environ: Mapping[str, str]) -> str:
    """The job that a batch script runs in, as it was queued: of an array, with its place there."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    return environ["SLURM_JOB_ID"] if array is None else f"{array}_{environ['SLURM_ARRAY_TASK_ID']}"


def stages_of(jobs: JobsFolder, submission: Submission) -> tuple[RunConfig, ...]:
    """The stages that a job trains: one of a chain, or all."""
    stages = read_run(jobs.config).stages(starting_point(recorded_start(jobs.run)))
    return stages if submission.stage is None else (stage_called(stages, submission.stage),)


def _reached_step(jobs: JobsFolder) -> int:
    """Steps of the newest checkpoint, or of the one that the run goes on from while it has none of its own."""
    if (saved_step := jobs.newest_saved_step()) is not None:
        return saved_step
    return 0 if (start := recorded_start(jobs.run)) is None else start.run.step


def _is_left_to_train(stage: RunConfig, saved_step: int) -> bool:
    """True if a link of a chain has anything to do.

    Raises:
        ConfigError: the stage's turn has not come.
    """
    assert stage.stage is not None
    if saved_step < stage.stage.steps_before:
        raise ConfigError(
            f"stage {stage.stage.name} begins at step {stage.stage.steps_before}, and the newest checkpoint is of step "
            f"{saved_step}: the job of the stage before it ended too early. `megamem submit --chain` queues what is left"
        )
    return saved_step < stage.train.num_steps


def _submission(jobs: JobsFolder) -> Submission:
    submission = jobs.submission()
    if submission is None:
        raise ConfigError(f"{jobs.path} holds no submission: start the run with `megamem submit`")
    return submission


def _number(job: str) -> int:
    first = job.partition("_")[0]
    return int(first) if first.isdecimal() else 0


def _conclude_lost(jobs: JobsFolder, submission: Submission, profile: ClusterConfig) -> None:
    """Record the end of an attempt that could not do so itself, and refuse to go on if that follows from it."""
    folders = jobs.attempt_folders()
    if not folders:
        return
    last = folders[-1]
    if last.ended() is None:
        ended = how_it_ended(jobs, last, None, asked_to_stop=False, job=JobNow())
        conclude(jobs, last, ended, profile)
    decision = last.decision()
    if (
        decision is not None
        and decision.action is not Action.REQUEUE
        and last.attempt().submission == submission.number
    ):
        raise ConfigError(f"{jobs.run.path} is not started again: {decision.reason}. `megamem submit` starts it anew")


def conclude(jobs: JobsFolder, folder: AttemptFolder, ended: Ended, profile: ClusterConfig) -> Decision:
    """Record how an attempt ended and what follows.

    Raises:
        UserError: the end cannot be recorded. Nobody could count the starts of such a run, so it is not started again.
    """
    # The next attempt drops the rows of steps that were lost.
    step, heard_at = last_step(jobs.run.metrics)
    ended = replace(ended, last_step=step, heard_at=heard_at)
    decision = decide([*jobs.ended_attempts(ended.attempt.submission), ended], profile.retry)
    try:
        folder.write_end(ended, decision)
    except OSError as error:
        # A finished run is known by its own history.
        if decision.action is not Action.DONE:
            raise UserError(
                f"attempt {folder.path.name} has ended ({ended.cause}: {ended.detail}), which cannot be recorded: "
                f"{folder.path}: {error.strerror}. Make room there, and `megamem submit` goes on"
            ) from error
    return decision


def end(jobs: JobsFolder, folder: AttemptFolder, exit_code: int, *, asked_to_stop: bool, job: JobNow) -> Decision:
    """Decide what follows from the end of an attempt's ranks.

    Args:
        exit_code: exit code of srun. The first rank that failed may have recorded another one, which counts.
        asked_to_stop: the batch script was told to stop, and told them.
        job: the job as Slurm sees it now.
    """
    ended = how_it_ended(jobs, folder, exit_code, asked_to_stop=asked_to_stop, job=job)
    return conclude(jobs, folder, ended, load_profile(jobs.profile))


def how_it_ended(
    jobs: JobsFolder, folder: AttemptFolder, exit_code: int | None, *, asked_to_stop: bool, job: JobNow
) -> Ended:
    """The end of an attempt, from what it left behind; see `end`. Without an exit code the script was lost too."""
    attempt, saved = folder.attempt(), jobs.newest_saved_step()
    bad = folder.read_bad_nodes()
    if jobs.cancelled.exists() or job.was_cancelled(attempt):
        how = "`megamem cancel`" if jobs.cancelled.exists() else "scancel, or as Slurm cancels jobs"
        return Ended(attempt, Cause.CANCELLED, saved, (), f"by {how}")
    if bad:
        return Ended(attempt, Cause.BAD_NODES, saved, tuple(sorted(bad)), _describe_bad(bad))
    if (node := failed_node(folder)) is not None:
        return Ended(attempt, Cause.LOST if exit_code is None else Cause.CRASHED, saved, (), f"node {node} failed")
    recorded, found = folder.first_failure(), first_failure(folder)
    # Srun says nothing new of ranks that were told to stop, nor of those of a script that was lost with them.
    is_told = exit_code is not None and folder.any_rank_began() and not folder.stopped.exists()
    if found is not None and (recorded is not None or is_told):
        failure, detail = found
        cause = cause_of(failure.exit_code, asked_to_stop=asked_to_stop)
        if cause is Cause.BAD_NODES and failure == recorded:
            return Ended(attempt, cause, saved, (failure.node,), detail)
        return Ended(attempt, _unless_bad(cause), saved, (), detail)
    if folder.stopped.exists():
        return Ended(attempt, Cause.STOPPED, saved, (), "it was asked to stop, and saved")
    if exit_code is None:
        detail = f"nothing says how the attempt on {', '.join(attempt.nodes)} ended: a node died, or Slurm took the job"
        return Ended(attempt, Cause.LOST, saved, (), detail)
    if exit_code and not asked_to_stop and not folder.any_rank_began():
        # A controller that did not answer, a node that was not ready: what srun says of it is in the job's log.
        detail = f"srun started no rank, and ended with exit code {exit_code}; see {jobs.log_of(attempt.job)}"
        return Ended(attempt, Cause.NOT_STARTED, saved, (), detail)
    cause = _unless_bad(cause_of(exit_code, asked_to_stop=asked_to_stop))
    return Ended(attempt, cause, saved, (), f"srun ended with exit code {exit_code}; see {folder.path}")


def _unless_bad(cause: Cause) -> Cause:
    """The cause, but a crash for bad nodes, where nobody knows for sure which node is bad."""
    return Cause.CRASHED if cause is Cause.BAD_NODES else cause


def _describe_bad(bad: Mapping[str, str]) -> str:
    return "; ".join(f"{node}: {problem}" for node, problem in sorted(bad.items()))


def goes_on_in_place(
    jobs: JobsFolder,
    folder: AttemptFolder,
    decision: Decision,
    live_nodes: Sequence[str],
    *,
    asked_to_stop: bool,
    job: JobNow,
) -> bool:
    """True if a run starts again at once in its job, on those of the job's nodes that are left.

    An attempt that saved nothing leaves its nodes, unless some of them are to blame: others may do better. One that saved
    something does not wait either, however often it failed.

    Args:
        live_nodes: nodes of the job that answer.
        job: the job as Slurm sees it now.
    """
    if asked_to_stop or decision.action is not Action.REQUEUE or job.is_started_again_by_slurm(folder.attempt()):
        return False
    profile, ended = load_profile(jobs.profile), folder.ended()
    assert ended is not None
    if ended.cause not in (Cause.CRASHED, Cause.BAD_NODES, Cause.NOT_STARTED) or job.state == _BEING_ENDED:
        return False
    left_s = seconds(job.time_left)
    if left_s is not None and left_s < _LEADS_LEFT * lead_seconds(jobs.run.metrics, profile.lead_s):
        return False
    submission = _submission(jobs)
    left = [node for node in live_nodes if node not in bad_nodes(jobs, submission.number)]
    if not ended.made_progress and set(ended.attempt.nodes) <= set(left):
        return False
    try:
        usable_nodes(stages_of(jobs, submission), profile, len(left), submission.nodes)
    except ConfigError:
        return False
    return True


def bad_nodes(jobs: JobsFolder, submission: int) -> set[str]:
    """The nodes that attempts of a submission found bad."""
    return {node for ended in jobs.ended_attempts(submission) for node in ended.bad_nodes}


def usable_nodes(stages: Sequence[RunConfig], profile: ClusterConfig, num_nodes: int, num_wanted: int) -> int:
    """The most of so many nodes on which layout and batch of the run, in all its stages, can be.

    Args:
        num_nodes: nodes that there are.
        num_wanted: nodes for the whole run; more are to spare.

    Raises:
        ConfigError: no number will do, or it is below what the profile allows.
    """
    least = profile.min_nodes if profile.min_nodes is not None else num_wanted
    reason = ConfigError(f"there are {num_nodes}")
    for number in range(min(num_nodes, num_wanted), least - 1, -1):
        try:
            for config in stages:
                validate(config, number * profile.ranks_per_node, on_this_machine=False)
        except ConfigError as error:
            reason = error
        else:
            return number
    raise ConfigError(
        f"no number of nodes from {least} to {num_wanted} can run this layout with {profile.ranks_per_node} ranks per "
        f"node: {reason}"
    )


def seconds(time_left: str) -> int | None:
    """squeue's days-hours:minutes:seconds in seconds; None where there is no limit."""
    days, _, clock = time_left.strip().rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or not (days.isdecimal() or not days):
        return None
    total = 0
    for part in parts:
        total = 60 * total + int(part)
    return int(days or 0) * 86400 + total
