"""Learning rates are closed functions of the step."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schedule import apply_schedule, backbone_lr, group_settings, value_multiplier
from pretrain.config.schema import TrainConfig
from pretrain.engine.build_optimizer import DENSE_GROUPS, SPLIT_GROUPS

CONSTANT = OptimizerConfig(lr=1e-3, schedule="constant", warmup_steps=10)
COSINE = OptimizerConfig(lr=1e-3, min_lr=1e-4, schedule="cosine", warmup_steps=10)
WSD = OptimizerConfig(lr=1e-3, min_lr=1e-4, schedule="wsd", warmup_steps=10, decay_steps=20)


@pytest.mark.parametrize("optimizer", [CONSTANT, COSINE, WSD], ids=["constant", "cosine", "wsd"])
@pytest.mark.parametrize(("step", "share"), [(0, 0.1), (1, 0.2), (4, 0.5), (9, 1.0)])
def test_warmup_is_linear_and_starts_above_zero(optimizer: OptimizerConfig, step: int, share: float) -> None:
    assert backbone_lr(step, optimizer, 100) == pytest.approx(share * 1e-3)


@pytest.mark.parametrize(
    ("optimizer", "step", "lr"),
    [
        (CONSTANT, 10, 1e-3),
        (CONSTANT, 99, 1e-3),
        (COSINE, 10, 1e-3),
        # Half way and two thirds through the 89 intervals between the end of warm-up and the last step.
        (COSINE, 10 + 89 * 0.5, 5.5e-4),
        (COSINE, 10 + 89 * 2 / 3, 3.25e-4),
        (COSINE, 99, 1e-4),
        (COSINE, 150, 1e-4),
        (WSD, 10, 1e-3),
        (WSD, 79, 1e-3),
        (WSD, 80, 1e-3 - 9e-4 / 20),
        (WSD, 89, 5.5e-4),
        (WSD, 99, 1e-4),
        (WSD, 150, 1e-4),
    ],
)
def test_shapes_after_warmup(optimizer: OptimizerConfig, step: Any, lr: float) -> None:
    assert backbone_lr(step, optimizer, 100) == pytest.approx(lr, rel=1e-12)


def test_without_warmup_the_first_step_is_at_the_peak() -> None:
    for optimizer in (CONSTANT, COSINE, WSD):
        assert backbone_lr(0, replace(optimizer, warmup_steps=0), 100) == 1e-3


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_runs_of_one_step(schedule: Literal["constant", "cosine", "wsd"]) -> None:
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-4, schedule=schedule)
    assert 1e-4 <= backbone_lr(0, optimizer, 1) <= 1e-3


@st.composite
def runs(draw: st.DrawFn) -> tuple[OptimizerConfig, int]:
    num_steps = draw(st.integers(1, 100))
    peak = draw(st.floats(1e-6, 1))
    warmup = draw(st.integers(0, num_steps))
    optimizer = OptimizerConfig(
        lr=peak,
        min_lr=peak * draw(st.floats(0, 1, allow_subnormal=False)),
        schedule=draw(st.sampled_from(["constant", "cosine", "wsd"])),
        warmup_steps=warmup,
        decay_steps=draw(st.integers(0, num_steps - warmup)),
    )
    return optimizer, num_steps


@settings(max_examples=100, deadline=None, derandomize=True)
@given(runs())
def test_rates_rise_to_the_peak_then_fall_to_the_minimum(run: tuple[OptimizerConfig, int]) -> None:
    optimizer, num_steps = run
    rates = [backbone_lr(step, optimizer, num_steps) for step in range(num_steps + 3)]
    rising, falling = rates[: optimizer.warmup_steps], rates[optimizer.warmup_steps :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(0 < rate <= optimizer.lr * (1 + 1e-12) for rate in rising)
    rounding = 1e-12 * optimizer.lr
    assert all(optimizer.min_lr - rounding <= rate <= optimizer.lr + rounding for rate in falling)
    if optimizer.warmup_steps:
        assert rising[-1] == pytest.approx(optimizer.lr)
    if optimizer.schedule == "wsd" and optimizer.decay_steps:
        assert rates[num_steps - 1] == pytest.approx(optimizer.min_lr, abs=rounding)
        stable = rates[optimizer.warmup_steps : num_steps - optimizer.decay_steps]
        assert set(stable) <= {optimizer.lr}
    if optimizer.schedule == "cosine" and num_steps - optimizer.warmup_steps > 1:
        assert rates[num_steps - 1] == pytest.approx(optimizer.min_lr, abs=rounding)


def test_value_multiplier_is_linear_in_tokens() -> None:
    optimizer = OptimizerConfig(value_lr_multiplier=4, value_lr_end_multiplier=1, value_lr_decay_tokens=64_000)
    train = TrainConfig(num_steps=1000, global_batch_size=4, sequence_length=16)
    expected = {0: 4.0, 250: 3.25, 500: 2.5, 999: 4 - 3 * 0.999, 1000: 1.0, 5000: 1.0}
    assert {step: value_multiplier(step, optimizer, train) for step in expected} == pytest.approx(expected)
    # The same tokens in twice as large steps.
    large = replace(train, global_batch_size=8)
    assert value_multiplier(250, optimizer, large) == pytest.approx(2.5)


def test_value_multiplier_decays_over_the_run_by_default() -> None:
    optimizer = OptimizerConfig(value_lr_multiplier=4, value_lr_end_multiplier=2)
    train = TrainConfig(num_steps=200)
    assert [value_multiplier(step, optimizer, train) for step in (0, 100, 200, 300)] == pytest.approx([4, 3, 2, 2])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    start=st.floats(0.1, 10),
    end=st.none() | st.floats(0.1, 10),
    decay_tokens=st.integers(0, 10**6),
    step=st.integers(0, 10**5),
)
def test_value_multiplier_stays_between_its_ends(start: float, end: float | None, decay_tokens: int, step: int) -> None:
    optimizer = OptimizerConfig(
        value_lr_multiplier=start, value_lr_end_multiplier=end, value_lr_decay_tokens=decay_tokens
    )
    train = TrainConfig(num_steps=100)
    multiplier = value_multiplier(step, optimizer, train)
    if end is None:
        assert multiplier == start
        return
    assert min(start, end) - 1e-9 <= multiplier <= max(start, end) + 1e-9
    next_one = value_multiplier(step + 1, optimizer, train)
    assert (next_one - multiplier) * (end - start) >= 0


def test_the_releases_schedule(golden_dir: Path) -> None:
    """Both rates at every recorded step, warm-up included; Memory+ has one of its own for the values."""
    golden = json.loads((golden_dir / "lr_schedule.json").read_text())
    shape, rows = golden["config"], golden["rows"]
    assert {row["mem_type"] for row in rows} == {"ultramem_v1", "ultramem_v2", "memory_plus"}
    train = TrainConfig(num_steps=shape["t_max"] + 1)
    tokens_per_step = train.global_batch_size * train.sequence_length
    for row in rows:
        optimizer = OptimizerConfig(
            lr=shape["initial_lr"],
            min_lr=shape["alpha_f"] * shape["initial_lr"],
            warmup_steps=shape["warmup_steps"],
            warmup_start=0.1,
            value_lr=1e-3 if row["mem_type"] == "memory_plus" else None,
            value_lr_multiplier=row["times"],
            value_lr_end_multiplier=1.0,
            value_lr_decay_tokens=round(shape["t_max"] * row["rate"]) * tokens_per_step,
        )
        of_group = group_settings(row["step"], optimizer, train)
        assert of_group["backbone"][0] == pytest.approx(row["lr"], rel=1e-12)
        assert of_group["values"][0] == of_group["pre_values"][0] == pytest.approx(row["lr_value"], rel=1e-12)


@pytest.mark.parametrize("start", [0.0, 0.25, 1.0])
def test_warmup_from_a_share_of_the_peak(start: float) -> None:
    optimizer = replace(CONSTANT, warmup_start=start)
    rates = [backbone_lr(step, optimizer, 100) for step in range(12)]
    assert rates[0] == pytest.approx(start * 1e-3)
    assert rates[5] == pytest.approx((1 + start) / 2 * 1e-3)
    assert rates[10] == rates[11] == 1e-3


def test_a_rate_of_the_tables_own_knows_no_schedule() -> None:
    optimizer = replace(COSINE, value_lr=2e-3)
    settings = [group_settings(step, optimizer, TrainConfig(num_steps=100)) for step in (0, 50, 99)]
    assert {group["values"][0] for group in settings} == {group["pre_values"][0] for group in settings} == {2e-3}
    with_pre = replace(optimizer, pre_value_lr_multiplier=0.5)
    assert group_settings(99, with_pre, TrainConfig(num_steps=100))["pre_values"][0] == pytest.approx(0.5e-4)


def test_groups_get_their_rate_and_decay() -> None:
    optimizer = replace(CONSTANT, weight_decay=0.2, value_lr_multiplier=3)
    train = TrainConfig(num_steps=100)
    assert group_settings(50, optimizer, train) == {
        "backbone": (1e-3, 0.2),
        "backbone_no_decay": (1e-3, 0.0),
        "retrieval": (1e-3, 0.2),
        "experts": (1e-3, 0.2),
        "values": (pytest.approx(3e-3), 0.2),
        "pre_values": (pytest.approx(3e-3), 0.2),
    }


def test_tables_may_have_rates_and_decay_of_their_own() -> None:
    optimizer = replace(
        CONSTANT,
        value_weight_decay=0.0,
        value_lr_multiplier=4,
        value_lr_end_multiplier=2,
        pre_value_lr_multiplier=0.5,
    )
    train = TrainConfig(num_steps=100)
    middle = group_settings(50, optimizer, train)
    assert middle["values"] == (pytest.approx(3e-3), 0.0)
    assert middle["pre_values"] == (pytest.approx(5e-4), 0.0)
    assert middle["backbone"] == (pytest.approx(1e-3), 0.1)
    # A multiplier follows the backbone through warm-up.
    assert group_settings(4, optimizer, train)["pre_values"][0] == pytest.approx(2.5e-4)


def test_applying_sets_every_group_by_its_name() -> None:
    train = TrainConfig(num_steps=100)
    groups: list[dict[str, Any]] = [
        {"name": name, "lr": math.nan, "weight_decay": math.nan, "betas": (0.9, 0.95)}
        for name in reversed((*DENSE_GROUPS, *SPLIT_GROUPS))
    ]
    apply_schedule(groups, 3, COSINE, train)
    expected = group_settings(3, COSINE, train)
    assert {group["name"]: (group["lr"], group["weight_decay"]) for group in groups} == expected
    assert all(group["betas"] == (0.9, 0.95) for group in groups)
