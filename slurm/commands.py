"""Slurm's commands: what they are asked, and what they answer."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import ConfigError, UserError

_PATIENCE_S = 120.0
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_ON_NODES = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_GONE = "Invalid job id specified"


class SlurmError(UserError):
    """Slurm refused, or did not answer."""


@dataclass(frozen=True)
class JobState:
    """A job as the controller sees it.

    Attributes:
        state: PENDING, RUNNING, COMPLETING, ...
        reason: reason why the job waits.
        comment: note that the job's script left there, for want of another place.
    """

    state: str
    reason: str
    comment: str = ""

    @property
    def is_over(self) -> bool:
        """True if nothing of the job will run any more."""
        return not self.waits and self.state not in _ON_NODES

    @property
    def waits(self) -> bool:
        """True if the job is in the queue, held or not."""
        return self.state in _WAITING


def is_there() -> bool:
    """True if this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None


def run_command(*words: str) -> str:
    """Run a command and return what it prints.

    Raises:
        ConfigError: the command is not installed.
        SlurmError: the command failed; the message has what it said.
    """
    try:
        result = subprocess.run(
            words, capture_output=True, text=True, timeout=_PATIENCE_S, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{words[0]} is not installed here: submit from a machine of the cluster") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{' '.join(words)} did not answer within {_PATIENCE_S:.0f} s") from error
    if result.returncode:
        said = (result.stderr or result.stdout).strip()
        raise SlurmError(f"{' '.join(words)} failed: {said}")
    return result.stdout.strip()


def submit(script: Path, options: Sequence[str] = ()) -> str:
    """Queue a batch script. Returns the job's number.

    Raises:
        SlurmError: the job was refused.
    """
    # With a federation, the cluster's name follows the number.
    return run_command("sbatch", "--parsable", *options, str(script)).split(";")[0]


def job_state(job: str) -> JobState | None:
    """A job's state; None if the controller knows it no longer."""
    try:
        fields = job_fields(job)
    except SlurmError as error:
        if _GONE in str(error):
            return None
        raise
    return JobState(fields.get("JobState", "UNKNOWN"), fields.get("Reason", ""), fields.get("Comment", ""))


def job_fields(job: str) -> dict[str, str]:
    """Fields of a job in `scontrol show job`, by name.

    Raises:
        SlurmError: Slurm knows no such job, or gives no answer.
    """
    said = run_command("scontrol", "-o", "show", "job", job)
    # The one field that may hold anything.
    comment = re.search(r" Comment=(.*?)(?= StdErr=|$)", said)
    rest = said if comment is None else said[: comment.start()] + said[comment.end() :]
    fields = dict(word.split("=", 1) for word in rest.split() if "=" in word)
    return fields if comment is None else {**fields, "Comment": comment[1].strip()}


def release(job: str) -> None:
    """Let a job start that was queued on hold."""
    run_command("scontrol", "release", job)


def cancel(job: str) -> None:
    """End a job."""
    run_command("scancel", job)
