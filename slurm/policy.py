"""Decision after an attempt has ended: a function of how the attempts so far went, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from pretrain.errors import CheckpointError, ConfigError, DataError, StoppedEarly
from slurm.profile import RetryConfig

RERUN_TO_DISAMBIGUATE = 16
"""Exit code of Megatron's rerun machinery: a result was not reproduced, and a restart from the checkpoint tells why."""
RESULT_IS_WRONG = 17
"""Exit code of the same: after the restart, this device computes something else than others."""
_MOST_FALSE_STARTS = 3
"""Attempts in a row in which no rank came to train, after which the fault is not with single nodes or moments."""
_WILL_REPEAT = (ConfigError.exit_code, DataError.exit_code, CheckpointError.exit_code)


class Cause(StrEnum):
    """Cause of an attempt's end."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """End on request (time limit, preemption) or by a watchdog, with what could be saved."""
    CANCELLED = "cancelled"
    MISTAKE = "mistake"
    """Configuration, data or checkpoint: the next attempt would meet the same."""
    BAD_NODES = "bad nodes"
    """The check of the nodes named some, or Megatron found one that computes wrongly."""
    NOT_STARTED = "not started"
    """No rank began: srun could not start them."""
    RERUN = "rerun"
    CRASHED = "crashed"
    LOST = "lost"
    """Nobody was left to say why: the node died, or Slurm took it."""


# Nothing in them has tried to train.
_FALSE_STARTS = (Cause.BAD_NODES, Cause.NOT_STARTED)
_FAILURES = (Cause.CRASHED, Cause.LOST, Cause.NOT_STARTED)


class Action(StrEnum):
    """Action after an attempt."""

    DONE = "done"
    REQUEUE = "requeue"
    STOP = "stop"


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        submission: number of the submission that it belongs to.
        job, restart: Slurm's number of the job, and how often it had been requeued.
        nodes: nodes of the job.
        num_nodes: number of them on which ranks run.
        saved_step: step of the newest checkpoint when it started; None without one.
        at: UTC, as ISO 8601 has it.
    """

    submission: int
    job: str
    restart: int
    nodes: tuple[str, ...]
    num_nodes: int
    saved_step: int | None
    at: str


@dataclass(frozen=True)
class Ended:
    """End of an attempt, with its cause.

    Attributes:
        saved_step: step of the newest checkpoint at its end; None without one.
        bad_nodes: nodes on which the run must not train.
        detail: the cause in words.
        last_step: last step that it took; None without any.
        heard_at: time at which it last wrote of a step or a save; UTC, as ISO 8601 has it.
        at: time at which its end was noticed; UTC, as ISO 8601 has it.
    """

    attempt: Attempt
    cause: Cause
    saved_step: int | None
    bad_nodes: tuple[str, ...] = ()
    detail: str = ""
    last_step: int | None = None
    heard_at: str | None = None
    at: str | None = None

    @property
    def made_progress(self) -> bool:
        """True if there is a newer checkpoint than at its start."""
        return (self.saved_step or 0) > (self.attempt.saved_step or 0)


@dataclass(frozen=True)
class Decision:
    """Action to take, with its reason.

    Attributes:
        reason: words for people.
        delay_s: seconds to wait before the next start.
        exclude: nodes that no later start of the submission may have: all that were found bad so far.
    """

    action: Action
    reason: str
    delay_s: float = 0.0
    exclude: tuple[str, ...] = ()


def cause_of(exit_code: int, *, asked_to_stop: bool) -> Cause:
    """Cause of the ranks' end by an exit code: of the first rank that failed, or of srun.

    Args:
        asked_to_stop: a signal told them to. One that came before they could listen kills them.
    """
    if exit_code == 0:
        return Cause.FINISHED
    if exit_code in _WILL_REPEAT:
        return Cause.MISTAKE
    if exit_code == RERUN_TO_DISAMBIGUATE:
        return Cause.RERUN
    if exit_code == RESULT_IS_WRONG:
        return Cause.BAD_NODES
    return Cause.STOPPED if exit_code == StoppedEarly.exit_code or asked_to_stop else Cause.CRASHED


def decide(attempts: Sequence[Ended], rules: RetryConfig) -> Decision:
    """Decide what follows after the last of the attempts of a submission.

    Done is done; a mistake stops at once. So do attempts in a row without a new checkpoint, whatever ended them: what
    keeps a run from its first save will do so again. Everything else is started again, without the nodes that were
    found bad: at once after a stop or a first failure, later after more failures in a row.

    Args:
        attempts: all that have ended, in order; one at least.
    """
    last = attempts[-1]
    if last.cause is Cause.FINISHED:
        return Decision(Action.DONE, "all steps are done")
    if last.cause is Cause.CANCELLED:
        return Decision(Action.STOP, f"it was cancelled {last.detail}")
    if last.cause is Cause.MISTAKE:
        return Decision(Action.STOP, f"the next start would meet the same: {last.detail}")
    false_starts = list(takewhile(lambda ended: ended.cause in _FALSE_STARTS, reversed(attempts)))
    if len(false_starts) >= _MOST_FALSE_STARTS:
        found = "found bad nodes" if last.cause is Cause.BAD_NODES else "started no rank"
        return Decision(Action.STOP, f"{len(false_starts)} starts in a row {found}, the last one: {last.detail}")
    tried = [ended for ended in attempts if ended.cause not in _FALSE_STARTS]
    idle = list(takewhile(lambda ended: not ended.made_progress, reversed(tried)))
    if last.cause not in _FALSE_STARTS and len(idle) >= rules.starts_without_checkpoint:
        saved = "no checkpoint" if last.saved_step is None else f"no checkpoint after that of step {last.saved_step}"
        return Decision(
            Action.STOP,
            f"{len(idle)} starts in a row ended with {saved} (the last one {last.cause}: {last.detail}): "
            "save more often (checkpoint.every_steps), or mend what ends them",
        )
    exclude = tuple(sorted({node for ended in attempts for node in ended.bad_nodes}))
    return Decision(
        Action.REQUEUE,
        f"{last.cause}: {last.detail}",
        _delay_s(attempts, rules),
        exclude,
    )


def _delay_s(attempts: Sequence[Ended], rules: RetryConfig) -> float:
    """0 after the first failure in a row, then doubled from one to the next."""
    failures = len(list(takewhile(lambda ended: ended.cause in _FAILURES, reversed(attempts))))
    if failures < 2:
        return 0.0
    return min(rules.backoff_s * 2.0 ** min(failures - 2, 60), rules.max_backoff_s)
