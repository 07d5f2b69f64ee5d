"""The end of the training loop: finished, stopped, diverged or failed; and which callbacks a run has."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest

import pretrain.train.loop as loop
from megamem.config.model import ModelConfig
from pretrain.config.health import HealthConfig, SlowRankConfig
from pretrain.config.schema import LoggingConfig, RunConfig
from pretrain.errors import StoppedEarly, UserError
from pretrain.state import RunState
from pretrain.train.callback import Callback
from pretrain.train.callbacks import default_callbacks
from pretrain.train.run import Run
from pretrain.train.trackers import MetricsFile
from tests.unit.loop.world import CONFIG, spaced


class Ends(Callback):
    """Notes where the run ended."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def on_end(self, run: Run) -> None:
        self.ends.append(run.state.step)


def test_a_run_that_some_rank_was_told_to_stop_ends_after_the_step_and_is_saved(make: Any) -> None:
    world, ends = make(), Ends()
    world.asked = 5
    with pytest.raises(StoppedEarly, match="stopped at step 5 of 12"):
        loop.train(world.run, [ends, *default_callbacks(world.run)])
    assert ends.ends == [5]
    assert world.log[-1] == "save 5"
    assert "evaluate 5" not in world.log


def test_a_signal_stops_after_the_next_step(make: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        world = make()

        class Kill(Callback):
            def on_step(self, run: Run, row: dict[str, Any], number: int = number) -> None:
                if run.state.step == 3:
                    os.kill(os.getpid(), number)

        with pytest.raises(StoppedEarly, match="stopped at step 4 of 12"):
            loop.train(world.run, [Kill()])
        assert [step.arguments["stop_requested"] for step in world.steps] == [False, False, False, True]


def test_a_stop_and_a_save_wait_for_the_update_of_tables(make: Any) -> None:
    """A window has three updates, and a skipped step is none; evaluations meanwhile are not passed over."""
    config = spaced(checkpoint=3, evaluation=4)
    world = make(replace(config, optimizer=replace(config.optimizer, tables_every=3)))
    world.run.state = RunState().updating_tables(3)
    world.skipped = {2}
    world.asked = 5
    with pytest.raises(StoppedEarly, match="stopped at step 7 of 12"):
        world.train()
    assert [step.arguments["updates_tables"] for step in world.steps] == [False, False, False, True, False, False, True]
    told = [event for event in world.log if event.startswith(("evaluate", "save"))]
    # The run ends at once, and passes over the evaluation of its last step.
    assert told == ["evaluate 4", "save 4", "save 7"]


def test_a_stop_passes_over_the_evaluation_of_its_step(make: Any) -> None:
    world = make(spaced(evaluation=5))
    world.asked = 5
    with pytest.raises(
        StoppedEarly, match=r"stopped at step 5 of 12 .* to go on, with the evaluation of this step first$"
    ):
        world.train()
    assert world.log[-2:] == ["evaluation 5 left in pass 1", "save 5"]
    assert world.run.state.owes_evaluation
    assert all("validation_loss" not in row for row in world.rows)


def test_a_stop_in_an_evaluation_ends_it_before_its_next_pass(make: Any) -> None:
    """No further step is taken, and no evaluation by the run that goes on is missing."""
    world = make(spaced(evaluation=5))
    world.asked_in_evaluation = (10, 2)
    with pytest.raises(StoppedEarly, match="stopped at step 10 of 12"):
        world.train()
    assert world.log[-3:] == ["step 10", "evaluation 10 left in pass 3", "save 10"]
    again = make(spaced(evaluation=5), world.run.state)
    again.train()
    assert again.log[0] == "evaluate 10"
    assert not again.run.state.owes_evaluation
    assert [row["step"] for row in again.rows if "validation_loss" in row] == [5, 10, 12]


def test_a_run_that_is_told_to_stop_on_its_last_step_still_owes_an_evaluation(make: Any) -> None:
    world = make()
    world.asked = 12
    with pytest.raises(StoppedEarly, match="stopped at step 12 of 12"):
        world.train()
    assert world.log[-2:] == ["evaluation 12 left in pass 1", "save 12"]
    again = make(state=world.run.state)
    again.run.last_saved_step = 12
    again.train()
    assert again.log == ["evaluate 12"]
    assert [row["step"] for row in again.rows if "validation_loss" in row] == [12]


def test_a_run_that_is_told_to_stop_again_takes_no_step(make: Any) -> None:
    state = RunState(step=5, owes_evaluation=True)
    world = make(state=state)
    world.asked_in_evaluation = (5, 1)
    world.run.last_saved_step = 5
    with pytest.raises(StoppedEarly, match="stopped at step 5 of 12"):
        world.train()
    assert world.log == ["evaluation 5 left in pass 2"]
    assert world.run.state == state


def test_a_run_without_held_out_documents_owes_none(make: Any) -> None:
    world = make(spaced(evaluation=5))
    world.run.held_out = ()
    world.asked = 12
    world.train()
    assert world.log[-1] == "save 12"
    assert not world.run.state.owes_evaluation


def test_too_many_skipped_steps_in_a_row_end_the_run_as_an_error(make: Any) -> None:
    world = make()
    world.skipped = {3, 4, 6, 7, 8}
    ends = Ends()
    with pytest.raises(UserError, match=r"the last 3 steps had no finite gradient .* diverged at step 8"):
        loop.train(world.run, [ends, MetricsFile()])
    assert ends.ends == []
    assert world.run.state == RunState(8, 96, 768, 3, 5, 3)
    assert world.rows[-1]["step"] == 8


def test_the_limit_counts_skips_from_before_a_resume(make: Any) -> None:
    world = make(state=RunState(step=5, num_skipped=2, num_skipped_in_row=2))
    world.skipped = {6}
    with pytest.raises(UserError, match="the last 3 steps"):
        world.train()
    assert len(world.steps) == 1


def test_a_step_is_saved_once(make: Any) -> None:
    world = make()
    for _ in range(2):
        world.run.save()
    world.run.state = RunState(step=1)
    world.run.save()
    assert world.log == ["save 0", "save 1"]
    assert world.run.last_saved_step == 1


def test_a_save_is_told_of_when_it_is_complete(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    world = make(spaced(checkpoint=5))
    world.train()
    assert world.saves == [
        {"step": step, "save_stall_s": 0.5, "save_s": 2.5, "save_bytes": 1000} for step in (5, 10, 12)
    ]
    # The save of step 5 is in flight in step 6, in which the ranks hear of it.
    assert [row["step"] for row in world.all_rows][4:8] == [5, 6, 5, 7]
    assert [step.arguments["save_progress"].done for step in world.steps] == [step in (6, 11) for step in range(1, 13)]
    assert "saved step 5: stalled 0.5 s, written in 2.5 s, 0.001 MB" in capsys.readouterr().err


def test_a_run_that_diverges_finishes_the_save_in_flight_and_one_that_fails_abandons_it(make: Any) -> None:
    world = make(spaced(checkpoint=1))
    world.skipped = set(range(1, 20))
    with pytest.raises(UserError, match="no finite gradient"):
        world.train()
    assert world.run.saver.in_flight is None
    assert world.log[-1] == "abandon"


@pytest.mark.parametrize(
    ("config", "is_main", "kinds"),
    [
        (
            spaced(usage=3),
            True,
            "Hangs MemoryUsage MemoryWatch SlowRanks MetricsFile ProgressLine Evaluations Checkpoints NextStep",
        ),
        (spaced(), True, "Hangs SlowRanks MetricsFile ProgressLine Evaluations Checkpoints NextStep"),
        (spaced(usage=3), False, "Hangs MemoryUsage MemoryWatch SlowRanks Evaluations Checkpoints NextStep"),
        (replace(spaced(usage=3), model=ModelConfig()), False, "Hangs SlowRanks Evaluations Checkpoints NextStep"),
        (
            replace(CONFIG, logging=LoggingConfig(memory_every_steps=0, tensorboard=True, wandb_mode="offline")),
            True,
            "Hangs SlowRanks MetricsFile ProgressLine TensorBoard WandB Evaluations Checkpoints NextStep",
        ),
        (
            replace(
                spaced(),
                health=HealthConfig(
                    hang_minutes=0.0, slow_ranks=SlowRankConfig(every_steps=0), compare_replicas_every_steps=5
                ),
            ),
            False,
            "Evaluations Replicas Checkpoints",
        ),
    ],
    ids=["observed", "not observed", "another rank", "dense", "with trackers", "other health"],
)
def test_a_run_does_what_its_configuration_asks_for(make: Any, config: RunConfig, is_main: bool, kinds: str) -> None:
    """Counters of what is never observed would take memory."""
    callbacks = default_callbacks(make(config, is_main=is_main).run)
    # In the order in which hooks go through them.
    assert [type(callback).__name__ for callback in sorted(callbacks, key=lambda each: each.priority)] == kinds.split()
