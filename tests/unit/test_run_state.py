"""The counters of a run."""

from __future__ import annotations

from dataclasses import asdict

from pretrain.state import RunState


def test_the_counters_after_updates_and_skips() -> None:
    state, seen = RunState(), []
    for updated in (True, False, False, True, False, True):
        state = state.after_step(samples=3, tokens=48, updated=updated)
        seen.append(
            (
                state.step,
                state.consumed_samples,
                state.consumed_tokens,
                state.num_updates,
                state.num_skipped,
                state.num_skipped_in_row,
            )
        )
    # Step, samples, tokens; updates, skips, skips without a break.
    assert seen == [
        (1, 3, 48, 1, 0, 0),
        (2, 6, 96, 1, 1, 1),
        (3, 9, 144, 1, 2, 2),
        (4, 12, 192, 2, 2, 0),
        (5, 15, 240, 2, 3, 1),
        (6, 18, 288, 3, 3, 0),
    ]


def test_a_batch_of_another_size_adds_its_own_samples_and_tokens() -> None:
    state = RunState(step=4, consumed_samples=32, consumed_tokens=512, num_updates=3, num_skipped=1)
    assert state.after_step(samples=5, tokens=7, updated=True) == RunState(5, 37, 519, 4, 1, 0)


def test_a_state_survives_being_written() -> None:
    state = RunState(6, 5, 4, 3, 2, 1)
    assert asdict(state) == {
        "step": 6,
        "consumed_samples": 5,
        "consumed_tokens": 4,
        "num_updates": 3,
        "num_skipped": 2,
        "num_skipped_in_row": 1,
    }
    assert RunState(**asdict(state)) == state
