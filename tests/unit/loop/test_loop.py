"""Steps of the training loop: their order, and the rates, samples and seeds that each is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from megatron.core import tensor_parallel

import pretrain.train.loop as loop
from megamem.config.model import ModelConfig
from pretrain.engine.gradient_norms import GradientNorms
from pretrain.engine.save_progress import SaveProgress
from pretrain.engine.step import LossSum, StepResult
from pretrain.state import RunState
from tests.unit.loop.world import BACKBONE_RATES, CONFIG, VALUE_RATES


def test_every_step_is_seeded_given_its_rates_and_taken_once(make: Any) -> None:
    world = make()
    world.train()
    seeds_and_steps = [line for line in world.log if line.startswith(("seed", "step"))]
    assert seeds_and_steps == [line for step in range(12) for line in (f"seed 5 {step}", f"step {step + 1}")]
    for step, lr, value_lr in zip(world.steps, BACKBONE_RATES, VALUE_RATES, strict=True):
        assert step.groups == {
            "backbone": (lr, 0.25),
            "backbone_no_decay": (lr, 0.0),
            "retrieval": (lr, 0.25),
            "experts": (lr, 0.25),
            "values": (value_lr, 0.5),
            "pre_values": (lr * 0.5, 0.5),
        }


def test_the_rows_say_what_the_steps_were_taken_with(make: Any) -> None:
    world = make()
    world.skipped = {2, 3, 7}
    world.train()
    rows = [row for row in world.rows if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["lr"] for row in rows] == BACKBONE_RATES
    assert [row["value_lr"] for row in rows] == VALUE_RATES
    assert {row["loss"] for row in rows} == {1.5}
    assert [row["grad_norm"] for row in rows] == [None if step in world.skipped else 0.5 for step in range(1, 13)]
    assert [row["consumed_samples"] for row in rows] == list(range(12, 145, 12))
    assert [row["consumed_tokens"] for row in rows] == list(range(96, 1153, 96))
    assert [row["num_skipped"] for row in rows] == [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert not any("value_grad_norm" in row or "memory" in row for row in rows)
    for row in rows:
        assert row["tokens_per_s"] * row["step_s"] == pytest.approx(96)
        # A unit of 1e12 operations per token, over four ranks.
        assert row["tflops_per_gpu"] == pytest.approx(row["tokens_per_s"] / 4)
    assert world.run.state == RunState(12, 144, 1152, 9, 3, 0)


def test_a_row_says_what_the_groups_carried_and_else_what_the_schedule_has(make: Any) -> None:
    """A schedule that is applied wrongly shows; a stage without tables has no group to say it."""
    world = make(state=RunState(step=3))
    groups = world.run.optimizer.param_groups
    result = StepResult(LossSum(6.0, 4.0), {}, GradientNorms(0.5, 0.75), False, 0, 0)
    for group in groups:
        group["lr"] = {"backbone": 0.125, "values": 0.375}.get(group["name"], 1.0)
    row = loop._account(world.run, result, 0.1)
    assert (row["lr"], row["value_lr"], row["value_grad_norm"]) == (0.125, 0.375, 0.75)
    world.run.state = RunState(step=1)
    world.run.optimizer.param_groups = [group for group in groups if group["name"] != "values"]
    row = loop._account(world.run, result, 0.1)
    assert (row["lr"], row["value_lr"]) == (0.125, VALUE_RATES[1])


def test_a_dense_model_has_no_rate_of_tables(make: Any) -> None:
    world = make(replace(CONFIG, model=ModelConfig()))
    world.train()
    assert not any("value_lr" in row for row in world.rows)


def test_losses_of_blocks_are_averaged_and_kept_by_block(make: Any) -> None:
    world = make()
    world.run.optimizer.param_groups = []
    auxiliary = {"key_balance": {0: 1.0, 2: 4.0}, "moe_z": {1: 3.0}}
    row = loop._account(world.run, StepResult(LossSum(6.0, 4.0), auxiliary, GradientNorms(0.5, None), False, 0, 0), 0.1)
    assert (row["key_balance"], row["moe_z"]) == (2.5, 3.0)
    assert row["memory"] == {"0": {"key_balance": 1.0}, "2": {"key_balance": 4.0}}
    assert row["moe"] == {"1": {"moe_z": 3.0}}


def test_the_steps_read_consecutive_samples_and_a_resumed_run_the_next(make: Any) -> None:
    """Twelve samples a step; of every four, this rank, the second of two, reads the last two."""
    for done in (0, 9):
        world = make(state=RunState(step=done, consumed_samples=12 * done))
        world.train()
        for number, step in enumerate(world.steps, start=done):
            first = 12 * number + 2
            expected = [[first, first + 1], [first + 4, first + 5], [first + 8, first + 9]]
            assert step.samples == [expected, expected]
            # Without a rule nothing is a spike.
            assert step.arguments.pop("judge")(1e9, 1e9) is None
            assert step.arguments == {
                "num_microbatches": 3,
                "graph": None,
                "updates_tables": True,
                "micro_batch_size": 2,
                "sequence_length": 8,
                "stop_requested": False,
                "save_progress": SaveProgress(),
            }


def test_seeds_are_of_the_run_and_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def seed(value: int, **keywords: Any) -> None:
        assert keywords == {"force_reset_rng": True}
        seeds.append(value)

    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", seed)
    for of_run in (1, 2, 3):
        for step in range(50):
            loop.seed_step(of_run, step)
    assert len(set(seeds)) == 150
    loop.seed_step(2, 7)
    assert seeds[-1] == seeds[57]
    loop.seed_step(10**9, 10**9)
    assert 0 <= seeds[-1] < 2**31
