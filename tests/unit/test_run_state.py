"""The counters of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from megamem.parameters.trained_part import ALL, Trained
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
        "num_spikes": 0,
        "num_rewinds": 0,
        "passed_over": (),
        "recent": (),
        "trained": (),
        "tables_every": (),
        "tokenizer": None,
        "trained_on": (),
        "owes_evaluation": False,
    }
    assert RunState(**asdict(state)) == state


def test_a_state_comes_back_from_json() -> None:
    state = RunState(
        step=6,
        num_rewinds=1,
        passed_over=((8, 12), (20, 28)),
        recent=((0.1 + 0.2, 1e-9), (3.0, 4.0)),
        trained=((0, Trained((2, 4))), (5, Trained(None, True)), (7, Trained((3,), True)), (8, ALL)),
        owes_evaluation=True,
    )
    assert RunState(**json.loads(json.dumps(asdict(state)))) == state


def test_versions_that_trained_layers_alone_wrote_these() -> None:
    state = RunState(trained=[[0, [2, 4]], [3, [1]], [5, None]])
    assert state.trained == ((0, Trained((2, 4))), (3, Trained((1,))), (5, ALL))


def updates_of(layer: int | None, state: RunState) -> int:
    """Updates of a parameter that serves a layer; None: of one that serves none."""
    return state.updates_of(lambda part: part.layers is None or layer in part.layers)


def test_updates_count_from_when_a_parameter_began_to_be_trained() -> None:
    state = RunState(num_updates=9)
    assert updates_of(1, state) == updates_of(None, state) == 9
    state = replace(RunState().training(Trained((2, 4))), num_updates=3)
    assert state.training(Trained((2, 4))) is state
    state = replace(state.training(Trained((2, 3))), num_updates=5)
    state = replace(state.training(ALL), num_updates=12)
    assert state.trained == ((0, Trained((2, 4))), (3, Trained((2, 3))), (5, ALL))
    # Trained all along; from the start with a break; from the second change on; from the last.
    assert [updates_of(layer, state) for layer in (2, 4, 3, None)] == [12, 7, 9, 7]


def test_what_was_trained_before_it_was_left_out_starts_anew() -> None:
    state = replace(RunState(num_updates=4).training(Trained((1,))), num_updates=6)
    assert updates_of(1, state) == 6
    assert updates_of(2, state.training(ALL)) == 0


def test_moments_that_start_at_zero_have_seen_no_update_of_anything() -> None:
    state = RunState(num_updates=4).training(Trained((1,))).without_moments()
    assert (state.num_updates, state.trained) == (0, ((0, Trained((1,))),))
    assert RunState(num_updates=4).without_moments() == RunState()


def test_tables_have_updates_of_their_own() -> None:
    """At every second one of the run from its third on, and at every third from its eighth on."""
    state = replace(RunState().updating_tables(1), num_updates=3).updating_tables(2)
    assert state.updating_tables(2) is state
    behind = []
    for _ in range(5):
        behind.append((state.num_waiting, state.updates_tables))
        state = state.after_step(samples=1, tokens=1, updated=False)
        state = state.after_step(samples=1, tokens=1, updated=True)
    assert behind == [(0, False), (1, True), (0, False), (1, True), (0, False)]
    assert state.updates_of(lambda _: True, is_table=True) == 3 + 2
    state = replace(state.updating_tables(3), num_updates=8 + 7)
    assert json.loads(json.dumps(asdict(state)))["tables_every"] == [[3, 2], [8, 3]]
    assert RunState(**json.loads(json.dumps(asdict(state)))) == state
    assert (state.num_waiting, state.updates_tables) == (1, False)
    assert state.updates_of(lambda _: True) == 15
    assert state.updates_of(lambda _: True, is_table=True) == 3 + 2 + 2
    since_6 = replace(state, trained=((2, Trained((1,))), (6, ALL)))
    assert since_6.updates_of(lambda part: part.layers is None, is_table=True) == 1 + 2
    anew = state.without_moments()
    assert (anew.tables_every, anew.updates_of(lambda _: True, is_table=True)) == (((0, 3),), 0)
    assert state.updating_tables(1).without_moments().tables_every == ()


def test_what_is_passed_over_is_what_was_read_since_the_checkpoint() -> None:
    """Counters are the checkpoint's; the place in the data, and how often the run went back, are not."""
    saved = RunState(step=10, consumed_samples=40, consumed_tokens=320, num_updates=9, num_skipped=1)
    spiked = RunState(step=13, consumed_samples=52, consumed_tokens=416, num_updates=11, num_skipped=2, num_spikes=1)
    back = spiked.back_at(saved)
    assert back == RunState(10, 52, 320, 9, 1, 0, num_spikes=1, num_rewinds=1, passed_over=((40, 52),))
    # The next one, before there is another checkpoint, passes over what came in between too.
    again = back.after_step(samples=4, tokens=32, updated=False, spike=True).back_at(saved)
    assert (again.consumed_samples, again.num_rewinds, again.passed_over) == (56, 2, ((40, 56),))
    # And one after another checkpoint leaves what was passed over before that as it is.
    later = RunState(step=20, consumed_samples=96, passed_over=((40, 56),))
    gone_on = RunState(step=22, consumed_samples=104, num_rewinds=2, passed_over=((40, 56),))
    assert gone_on.back_at(later).passed_over == ((40, 56), (96, 104))
