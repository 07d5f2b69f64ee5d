"""Rows, evaluations, observations and saves of the training loop: on which steps, and in which order."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pretrain.train.loop as loop
from pretrain.config.schema import RunConfig
from pretrain.errors import StoppedEarly, UserError
from pretrain.run.history import End, Incident, Start, read_history
from pretrain.state import RunState
from pretrain.train.callbacks import default_callbacks
from pretrain.train.trackers import MetricsFile, TensorBoard
from tests.unit.loop.world import VALUE_RATES, WORLD_SIZE, spaced


@pytest.mark.parametrize(
    ("config", "rows", "observed", "evaluated", "saved"),
    [
        (spaced(), list(range(1, 13)), [], [12], [12]),
        (spaced(rows=5), [5, 10, 12], [], [12], [12]),
        (spaced(rows=4, usage=6), [4, 6, 8, 12], [6, 12], [12], [12]),
        (spaced(rows=5, usage=1), list(range(1, 13)), list(range(1, 13)), [12], [12]),
        (spaced(evaluation=5), list(range(1, 13)), [], [5, 10, 12], [12]),
        (spaced(evaluation=4), list(range(1, 13)), [], [4, 8, 12], [12]),
        (spaced(checkpoint=5), list(range(1, 13)), [], [12], [5, 10, 12]),
        (spaced(checkpoint=6), list(range(1, 13)), [], [12], [6, 12]),
        (spaced(rows=100, usage=5, evaluation=3, checkpoint=4), [5, 10, 12], [5, 10], [3, 6, 9, 12], [4, 8, 12]),
        (spaced(usage=100, evaluation=100, checkpoint=100), list(range(1, 13)), [], [12], [12]),
    ],
    ids=[
        "by default",
        "rows",
        "rows and usage",
        "usage on every step",
        "evaluation",
        "evaluation of the last step too",
        "checkpoints",
        "a checkpoint of the last step too",
        "all",
        "more than the run has",
    ],
)
def test_rows_evaluations_and_checkpoints_are_on_the_steps_that_were_asked_for(
    make: Any, config: RunConfig, rows: list[int], observed: list[int], evaluated: list[int], saved: list[int]
) -> None:
    world = make(config)
    world.train()
    assert [row["step"] for row in world.rows if "loss" in row] == rows
    assert [row["step"] for row in world.rows if "memory" in row] == observed
    evaluations = [row for row in world.rows if "validation_loss" in row]
    assert evaluations == [
        {
            "step": step,
            "validation_loss": 1.5,
            "bits_per_byte": 2.5,
            "validation_tokens": 3,
            "validation_bytes": 4,
        }
        for step in evaluated
    ]
    assert [line for line in world.log if line.startswith("save")] == [f"save {step}" for step in saved]
    assert [line for line in world.log if line.startswith("evaluate")] == [f"evaluate {step}" for step in evaluated]
    assert world.log.count("observed") == len(observed)


def test_a_step_is_observed_from_its_beginning_and_evaluated_before_it_is_saved(make: Any) -> None:
    world = make(spaced(usage=3, evaluation=3, checkpoint=3))
    world.train()
    third = world.log.index("step 3")
    assert world.log[third - 2 : third + 5] == [
        "observe",
        "seed 5 2",
        "step 3",
        "observed",
        "evaluate 3",
        "save 3",
        "seed 5 3",
    ]
    # The row of the step stands before that of its evaluation.
    assert [("loss" in row) for row in world.rows if row["step"] == 3] == [True, False]
    (row,) = [row for row in world.rows if row["step"] == 3 and "loss" in row]
    assert row["memory"] == {"3": {"coverage": 0.25}}


def test_the_first_step_can_be_observed(make: Any) -> None:
    world = make(spaced(usage=1))
    world.train()
    assert world.log[:3] == ["observe", "seed 5 0", "step 1"]
    assert [line for line in world.log if line not in ("observe", "observed")][-3:] == [
        "step 12",
        "evaluate 12",
        "save 12",
    ]
    assert world.log.count("observed") == 12


def test_a_resumed_run_keeps_rows_up_to_its_checkpoint_and_its_steps_fall_alike(make: Any, tmp_path: Path) -> None:
    old = [{"step": step, "loss": 9.0} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old) + '{"step": 9, "lo')
    state = RunState(step=6, consumed_samples=72, consumed_tokens=576, num_updates=6)
    world = make(spaced(rows=4, usage=7, evaluation=3, checkpoint=4), state=state)
    world.run.last_saved_step = 6
    world.train()
    assert world.rows[:6] == old[:6]
    assert [row["step"] for row in world.rows[6:] if "loss" in row] == [7, 8, 12]
    assert [row["step"] for row in world.rows[6:] if "loss" not in row] == [9, 12]
    assert world.log[:3] == ["observe", "seed 5 6", "step 7"]
    assert [line for line in world.log if line.startswith("save")] == ["save 8", "save 12"]
    assert [step.groups["values"][0] for step in world.steps] == VALUE_RATES[6:]


def test_a_bad_row_is_named_and_does_not_end_a_start(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [json.dumps({"step": step, "loss": 9.0}).encode() + b"\n" for step in (1, 2, 3)]
    bad = [b'{"step": 2, "note": "\xff"}\n', b"[2]\n", b'{"loss": 2.0}\n']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*old[:2], *bad, old[2]]))
    world = make(spaced(checkpoint=4), state=RunState(3, 36, 288, 3))
    world.run.last_saved_step = 3
    world.train()
    assert [row["step"] for row in world.rows[:4]] == [1, 2, 3, 4]
    told = capsys.readouterr().err
    for number, reason in ((3, "has a byte that is not UTF-8 (0xff)"), (4, "is not an object"), (5, "has no `step`")):
        assert f"metrics.jsonl, line {number}: the row {reason}, and is left out" in told


def test_rows_of_a_run_without_a_checkpoint_are_set_aside_with_a_word(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = b"".join(json.dumps({"step": step, "loss": 9.0}).encode() + b"\n" for step in (1, 2, 3)) + b'{"st'
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_bytes(old)
        world = make(spaced(checkpoint=4))
        world.train()
        assert (tmp_path / f"metrics-{number}.jsonl").read_bytes() == old
        assert world.rows[0]["step"] == 1
        assert world.rows[0]["loss"] != 9.0
        told = capsys.readouterr().err
        assert "has rows of 3 steps and no checkpoint" in told
        assert f"starts again at step 0; those rows are in metrics-{number}.jsonl" in told
    (tmp_path / "checkpoints" / "step_00000004").mkdir(parents=True)
    world = make(spaced(checkpoint=4))
    world.train()
    assert not (tmp_path / "metrics-3.jsonl").exists()
    assert "no checkpoint" not in capsys.readouterr().err


def owner_of(checks: list[str]) -> Any:
    return SimpleNamespace(check=lambda: checks.append("check"))


def test_an_owner_records_where_it_started_and_that_all_was_saved(make: Any) -> None:
    """Two starts: one is asked to stop at the fifth step, the other ends with an error."""
    world, checks = make(spaced(checkpoint=4)), list[str]()
    world.asked = 5
    with pytest.raises(StoppedEarly):
        loop.train(world.run, default_callbacks(world.run, owner_of(checks)))
    resumed = make(state=world.run.state)
    resumed.skipped = set(range(6, 20))
    with pytest.raises(UserError, match="no finite gradient"):
        loop.train(resumed.run, default_callbacks(resumed.run, owner_of(checks)))
    start, end, again, *incidents = read_history(world.run.folder)
    assert [(event.step, event.kind) for event in incidents if isinstance(event, Incident)] == [
        (step, "non-finite") for step in (6, 7, 8)
    ]
    assert isinstance(start, Start)
    assert isinstance(end, End)
    assert isinstance(again, Start)
    assert (start.step, start.consumed_tokens, start.num_ranks) == (0, 0, WORLD_SIZE)
    assert (end.step, end.consumed_tokens) == (5, world.run.state.consumed_tokens)
    assert (again.step, again.consumed_tokens) == (5, end.consumed_tokens)
    assert "check" in checks


def test_an_end_is_recorded_after_the_last_save(make: Any) -> None:
    world = make()
    events: list[int] = []
    finish = world.run.saver.finish

    def finish_and_count() -> None:
        events.append(len(read_history(world.run.folder)))
        finish()

    world.run.saver.finish = finish_and_count
    loop.train(world.run, default_callbacks(world.run, owner_of([])))
    assert events[-1] == 1
    assert len(read_history(world.run.folder)) == 2


def test_ranks_but_the_first_write_nothing_and_take_part_in_all_else(make: Any) -> None:
    world = make(spaced(usage=4, evaluation=4, checkpoint=4), is_main=False)
    world.train()
    assert not world.run.folder.metrics.exists()
    assert [line for line in world.log if not line.startswith(("seed", "step"))] == [
        line for step in (4, 8, 12) for line in ("observe", "observed", f"evaluate {step}", f"save {step}")
    ]


def test_trackers_get_the_same_rows_as_the_file(make: Any) -> None:
    world = make(spaced(rows=5, usage=7, evaluation=5))
    tracked: list[tuple[str, float, int]] = []
    tracker = TensorBoard()
    tracker.on_start = lambda run: None  # type: ignore[method-assign]
    writer: Any = SimpleNamespace(
        add_scalar=lambda *scalar: tracked.append(scalar), close=lambda: tracked.append(("closed", 0, 0))
    )
    tracker._writer = writer
    callbacks = {type(callback).__name__: callback for callback in default_callbacks(world.run)}
    measuring, file, evaluations, checkpoints = (
        callbacks[name] for name in ("MemoryUsage", "MetricsFile", "Evaluations", "Checkpoints")
    )
    assert isinstance(file, MetricsFile)
    loop.train(world.run, [measuring, file, tracker, evaluations, checkpoints])
    steps_of = {name: [step for found, _, step in tracked if found == name] for name, _, _ in tracked}
    assert steps_of["loss"] == [row["step"] for row in world.rows if "loss" in row] == [5, 7, 10, 12]
    assert steps_of["memory/3/coverage"] == [7]
    assert steps_of["validation_loss"] == [5, 10, 12]
    assert "step" not in steps_of
    assert tracked[-1][0] == "closed"
