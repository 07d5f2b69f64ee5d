"""Records of a run's jobs in its folder: `RUN/slurm/`. No torch is imported, and every file appears whole.

slurm/submission.json        what was asked for last
slurm/jobs.jsonl             every job, in the order in which they were queued
slurm/job_<id>.log           what the batch script says, over all its restarts
slurm/code/<hash>/           the code that runs;  config.yaml, profile.yaml, job.sh beside it
slurm/attempts/0001/         one per start: attempt.json, end.json, rank_<k>.log
slurm/latest                 the newest attempt
slurm/chain/2/               the same (but for code) of the job that trains the second stage of a chain
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallel.machine.atomic_write import atomic_write
from pretrain.checkpoint.folder import newest_readable
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.history import now
from pretrain.run.metric_rows import read_rows
from slurm.policy import Action, Attempt, Cause, Decision, Ended

_CHAIN = "chain"


@dataclass(frozen=True)
class Submission:
    """Request of `megamem submit`.

    Attributes:
        number: counts the submissions of the run, from 1. Attempts of earlier ones say nothing about this one.
        cluster: name of the profile.
        nodes, ranks_per_node: size of the whole run.
        code: hash of the code that runs.
        lead_s: seconds before the time limit at which Slurm signals.
        at: UTC, as ISO 8601 has it.
        stage: name of the stage that the job trains, as a link of a chain; None: the whole run.
    """

    number: int
    cluster: str
    nodes: int
    ranks_per_node: int
    code: str
    lead_s: int
    at: str
    stage: str | None = None


@dataclass(frozen=True)
class FirstFailure:
    """Failure of the first rank that failed.

    Attributes:
        rank: its number.
        node: name of its node.
        exit_code: exit code of the command.
    """

    rank: int
    node: str
    exit_code: int


class JobsFolder:
    """The records of a run's jobs, or of those that train one stage of it."""

    def __init__(self, run: RunFolder, link: int | None = None) -> None:
        """`link`: number of the stage, from 1, whose jobs are a link of a chain."""
        self.run, self.link = run, link
        self.path = run.path / "slurm" if link is None else run.path / "slurm" / _CHAIN / str(link)
        self.config = self.path / "config.yaml"
        self.profile = self.path / "profile.yaml"
        self.script = self.path / "job.sh"
        self.code = run.path / "slurm" / "code"
        self.jobs = self.path / "jobs.jsonl"
        self.attempts = self.path / "attempts"
        self.latest = self.path / "latest"
        self.cancelled = self.path / "cancelled"
        self._submission = self.path / "submission.json"

    @classmethod
    def at(cls, path: Path) -> JobsFolder:
        """The records in a folder, which the batch script names."""
        if path.parent.name == _CHAIN:
            return cls(RunFolder(path.parents[2]), int(path.name))
        return cls(RunFolder(path.parent))

    def next_link(self) -> JobsFolder | None:
        """The records of the next stage's jobs, if they were submitted together with these."""
        submission = self.submission()
        if self.link is None or submission is None:
            return None
        following = JobsFolder(self.run, self.link + 1)
        theirs = following.submission()
        return following if theirs is not None and theirs.number == submission.number else None

    def submission(self) -> Submission | None:
        """The last submission; None if the run was never submitted."""
        return _read(Submission, self._submission)

    def write_submission(self, submission: Submission) -> None:
        """Record what is asked for, before it is queued."""
        _write(self._submission, asdict(submission))

    def add_job(self, job: str, why: str) -> None:
        """Record a job that was queued."""
        line = json.dumps({"job": job, "at": now(), "why": why}) + "\n"
        with self.jobs.open("ab") as stream:
            # A full disk may have cut the line before it.
            stream.write((line if self._ends_whole() else f"\n{line}").encode())

    def job_ids(self) -> list[str]:
        """The jobs of the run, the newest last."""
        return [job for job, _ in self.job_times()]

    def job_times(self) -> list[tuple[str, str]]:
        """The jobs of the run, the newest last, each with the time at which it was queued."""
        # A full disk may have cut a row. Its job says of itself that it is there when it begins.
        return [(row["job"], row["at"]) for row in read_rows(self.jobs, job=str, at=str)]

    def _ends_whole(self) -> bool:
        return not self.jobs.exists() or self.jobs.read_bytes()[-1:] in (b"", b"\n")

    def log_of(self, job: str) -> Path:
        """Path of the log of a job's script."""
        return self.path / f"job_{job}.log"

    def newest_saved_step(self) -> int | None:
        """Step of the newest checkpoint whose files are all there."""
        saved = newest_readable(self.run.checkpoints)
        return None if saved is None else saved.step

    def begin_attempt(self, attempt: Attempt) -> AttemptFolder:
        """The folder of a new attempt, to which `latest` points from now on."""
        folder = AttemptFolder(self.attempts / f"{len(self.attempt_folders()) + 1:04d}")
        # Whoever looks finds it with its record, or not at all.
        unnamed = AttemptFolder(self.attempts / f".{folder.path.name}.{uuid.uuid4().hex}")
        unnamed.path.mkdir(parents=True)
        _write(unnamed.begun, asdict(attempt))
        unnamed.path.rename(folder.path)
        link = self.path / f".latest.{uuid.uuid4().hex}"
        link.symlink_to(Path("attempts") / folder.path.name)
        os.replace(link, self.latest)
        return folder

    def attempt_folders(self) -> list[AttemptFolder]:
        """Every attempt, in order."""
        if not self.attempts.exists():
            return []
        return [AttemptFolder(path) for path in sorted(self.attempts.iterdir()) if path.name.isdecimal()]

    def ended_attempts(self, submission: int) -> list[Ended]:
        """Ends of a submission's attempts, in order, as far as they are known."""
        folders = [folder for folder in self.attempt_folders() if folder.attempt().submission == submission]
        return [ended for folder in folders if (ended := folder.ended()) is not None]


def jobs_folders(run: RunFolder) -> list[JobsFolder]:
    """All records of a run's jobs: those of the whole run, then of its stages."""
    links = (run.path / "slurm" / _CHAIN).glob("*")
    numbers = sorted(int(path.name) for path in links if path.name.isdecimal())
    found = [JobsFolder(run), *(JobsFolder(run, number) for number in numbers)]
    return [jobs for jobs in found if jobs.submission() is not None]


def submitted_last(run: RunFolder) -> list[JobsFolder]:
    """Records of the last submission: one, or the links of a chain. None if the run was never submitted."""
    found = [(jobs, submission) for jobs in jobs_folders(run) if (submission := jobs.submission()) is not None]
    newest = max((submission.number for _, submission in found), default=0)
    return [jobs for jobs, submission in found if submission.number == newest]


class AttemptFolder:
    """The records of one start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = path / "attempt.json"
        self.end = path / "end.json"
        self.failure = path / "failure.json"
        self.stopped = path / "stopped.json"
        self.bad_nodes = path / "bad_nodes.json"
        self.rendezvous = path / "rendezvous.json"
        self._refused = path / "refused.txt"
        self._srun = path / "srun.log"

    def attempt(self) -> Attempt:
        """Record of the attempt at its start.

        Raises:
            ConfigError: the attempt's record is gone.
        """
        attempt = _read(Attempt, self.begun)
        if attempt is None:
            raise ConfigError(f"{self.begun} is missing: remove {self.path}")
        return attempt

    def ended(self) -> Ended | None:
        """End of the attempt; None as long as nobody knows."""
        found = _read_json(self.end)
        if found is None:
            return None
        return Ended(
            self.attempt(),
            Cause(found["cause"]),
            found["saved_step"],
            tuple(found["bad_nodes"]),
            found["detail"],
            found.get("last_step"),
            found.get("heard_at"),
            found["at"],
        )

    def decision(self) -> Decision | None:
        """Decision at the attempt's end; None as long as there is none."""
        found = _read_json(self.end)
        if found is None:
            return None
        made = found["decision"]
        return Decision(Action(made["action"]), made["reason"], made["delay_s"], tuple(made["exclude"]))

    def write_end(self, ended: Ended, decision: Decision) -> None:
        """Record the end, and what follows from it."""
        record = {
            "cause": ended.cause,
            "saved_step": ended.saved_step,
            "bad_nodes": ended.bad_nodes,
            "detail": ended.detail,
            "last_step": ended.last_step,
            "heard_at": ended.heard_at,
            "at": now(),
            "decision": asdict(decision),
        }
        _write(self.end, record)

    def refused(self) -> str:
        """Slurm's refusal, with its reason, when the run was to be started again; empty if it did not refuse."""
        return self._refused.read_text(encoding="utf-8", errors="replace").strip() if self._refused.exists() else ""

    def srun_words(self) -> str:
        """Messages of srun about the ranks, in its order; empty if none."""
        return self._srun.read_text(encoding="utf-8", errors="replace") if self._srun.exists() else ""

    def tell_failure(self, failure: FirstFailure) -> None:
        """Record how a rank failed, unless another one was first."""
        temporary = self.path / f".failure.{uuid.uuid4().hex}"
        try:
            temporary.write_text(json.dumps(asdict(failure)), encoding="utf-8")
            os.link(temporary, self.failure)
        except FileExistsError:
            pass
        finally:
            temporary.unlink(missing_ok=True)

    def first_failure(self) -> FirstFailure | None:
        """Failure of the first rank that failed; None if none reported one."""
        return _read(FirstFailure, self.failure)

    def write_bad_nodes(self, problems: Mapping[str, str]) -> None:
        """Record the nodes on which a run must not train, each with the reason."""
        _write(self.bad_nodes, dict(problems))

    def read_bad_nodes(self) -> dict[str, str]:
        """The nodes on which a run must not train, each with the reason, as recorded; empty if all were good."""
        return _read_json(self.bad_nodes) or {}

    def log_of(self, rank: int) -> Path:
        """Path of a rank's log."""
        return self.path / f"rank_{rank}.log"

    def any_rank_began(self) -> bool:
        """True if any rank's task was started: its log is opened for it on its node."""
        return any(self.path.glob("rank_*.log"))

    def last_words(self, rank: int) -> str:
        """The last line that a rank printed."""
        try:
            text = self.log_of(rank).read_bytes()[-4096:].decode(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("megamem: ")]
        return (said or lines or [""])[-1]


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path) as stream:
        stream.write(json.dumps(content, indent=1).encode() + b"\n")


def _read(cls: Any, path: Path) -> Any:
    found = _read_json(path)
    if found is None:
        return None
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it") from error
    return found
