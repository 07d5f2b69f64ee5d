"""Actions after an attempt has ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slurm.policy import Action, Attempt, Cause, Decision, Ended, cause_of, decide
from slurm.profile import RetryConfig

RULES = RetryConfig(starts_without_checkpoint=2, backoff_s=60.0, max_backoff_s=200.0)


def ended(cause: Cause, before: int | None, after: int | None, bad_nodes: Sequence[str] = ()) -> Ended:
    attempt = Attempt(1, "7", 0, ("n1", "n2"), 2, before, "2026-01-01T00:00:00+00:00")
    return Ended(attempt, cause, after, tuple(bad_nodes), "why")


def saving(*causes: Cause) -> list[Ended]:
    """Attempts that each came to a new checkpoint."""
    return [ended(cause, number or None, number + 1) for number, cause in enumerate(causes)]


def test_what_is_done_is_done() -> None:
    assert decide(saving(Cause.CRASHED, Cause.FINISHED), RULES).action is Action.DONE
    # Without a step: it was finished before.
    assert decide([ended(Cause.LOST, None, 9), ended(Cause.FINISHED, 9, 9)], RULES).action is Action.DONE


@pytest.mark.parametrize("cause", [Cause.MISTAKE, Cause.CANCELLED])
def test_what_would_repeat_or_was_cancelled_stops_at_once(cause: Cause) -> None:
    assert decide([ended(cause, None, 5)], RULES).action is Action.STOP


@pytest.mark.parametrize("cause", [Cause.STOPPED, Cause.CRASHED, Cause.LOST, Cause.RERUN])
def test_two_starts_without_a_new_checkpoint_stop(cause: Cause) -> None:
    one = [*saving(Cause.STOPPED), ended(cause, 1, 1)]
    assert decide(one, RULES).action is Action.REQUEUE
    two = decide([*one, ended(cause, 1, 1)], RULES)
    assert two.action is Action.STOP
    assert "2 starts in a row ended with no checkpoint after that of step 1" in two.reason
    # A checkpoint in between counts anew.
    assert decide([*one, ended(cause, 1, 2), ended(cause, 2, 2)], RULES).action is Action.REQUEUE


def test_the_first_save_is_guarded_too() -> None:
    reason = decide([ended(Cause.STOPPED, None, None)] * 2, RULES).reason
    assert "2 starts in a row ended with no checkpoint (" in reason


def test_a_stop_and_a_first_failure_go_on_at_once_and_further_ones_later() -> None:
    assert decide(saving(Cause.STOPPED, Cause.STOPPED), RULES).delay_s == 0
    delays = [decide(saving(*[Cause.CRASHED] * number), RULES).delay_s for number in range(1, 6)]
    assert delays == [0, 60, 120, 200, 200]
    assert decide(saving(Cause.CRASHED, Cause.CRASHED, Cause.STOPPED, Cause.LOST), RULES).delay_s == 0
    assert decide(saving(*[Cause.CRASHED] * 5000), RULES).delay_s == 200


def test_bad_nodes_are_left_out_all_of_them_and_do_not_count_as_starts() -> None:
    first = [ended(Cause.BAD_NODES, None, None, ["n2"])]
    assert decide(first, RULES) == Decision(Action.REQUEUE, "bad nodes: why", 0.0, ("n2",))
    second = [*first, ended(Cause.BAD_NODES, None, None, ["n1"])]
    assert decide(second, RULES).exclude == ("n1", "n2")
    assert decide([*second, ended(Cause.CRASHED, None, None)], RULES).action is Action.REQUEUE
    third = decide([*second, ended(Cause.BAD_NODES, None, None, ["n3"])], RULES)
    assert third.action is Action.STOP
    assert "3 starts in a row found bad nodes" in third.reason


def test_what_slurm_did_not_start_is_tried_again_later_and_does_not_count_as_a_start() -> None:
    """A controller that does not answer must not end the run after a first start without a checkpoint."""
    idle = [*saving(Cause.STOPPED), ended(Cause.CRASHED, 1, 1)]
    once = decide([*idle, ended(Cause.NOT_STARTED, 1, 1)], RULES)
    assert (once.action, once.delay_s) == (Action.REQUEUE, 60)
    assert decide([ended(Cause.NOT_STARTED, None, None)], RULES).delay_s == 0
    third = decide([*idle, *[ended(Cause.NOT_STARTED, 1, 1)] * 3], RULES)
    assert third.action is Action.STOP
    assert "3 starts in a row started no rank" in third.reason
    assert decide([*idle, ended(Cause.NOT_STARTED, 1, 1), ended(Cause.LOST, 1, 1)], RULES).action is Action.STOP


@pytest.mark.parametrize(
    ("exit_code", "asked", "cause"),
    [
        (0, False, Cause.FINISHED),
        (0, True, Cause.FINISHED),
        (1, False, Cause.CRASHED),
        (2, False, Cause.MISTAKE),
        (3, True, Cause.MISTAKE),
        (4, False, Cause.MISTAKE),
        (16, False, Cause.RERUN),
        (17, False, Cause.BAD_NODES),
        (75, False, Cause.STOPPED),
        (137, False, Cause.CRASHED),
        # The signal came before Python could listen.
        (138, True, Cause.STOPPED),
    ],
)
def test_exit_codes(exit_code: int, asked: bool, cause: Cause) -> None:
    assert cause_of(exit_code, asked_to_stop=asked) is cause
