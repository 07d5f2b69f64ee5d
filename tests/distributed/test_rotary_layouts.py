"""Stretched rotary positions are the same on every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_runs import SHARED, on, tiny_run

from megamem.attention.rotary_config import RotaryScalingConfig
from pretrain.config.schema import RunConfig

# All of the head's four frequencies 1, 0.1, 0.01 and 0.001 but the first are lower, and scores 1.7 times as large.
SCALING = RotaryScalingConfig("yarn", factor=16.0, original_length=16, beta_fast=2.0, beta_slow=0.1)
STRETCHED = replace(SHARED, model=replace(SHARED.model, rotary_scaling=SCALING))
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2 x context 2": {"tensor": 2, "context": 2},
    "pipeline 2 x context 2": {"pipeline": 2, "context": 2, "micro_batch_size": 2},
    "context 4, recomputed": {"context": 4, "recompute": "full"},
}
STEPS = 3


def losses(config: RunConfig) -> list[tuple[float, float]]:
    with tiny_run(config) as run:
        return run.train(STEPS)


def test_losses_and_norms_are_those_of_one_rank(run_ranks: Any) -> None:
    ((expected, plain),) = run_ranks(lambda: (losses(STRETCHED), losses(SHARED)), 1)
    for (loss, _), (other, _) in zip(expected, plain, strict=True):
        assert abs(loss - other) > 1e-4 * other
    for of_rank in run_ranks(lambda: {name: losses(on(STRETCHED, **axes)) for name, axes in LAYOUTS.items()}, 4):
        for name, rows in of_rank.items():
            for row, of_one in zip(rows, expected, strict=True):
                assert row == pytest.approx(of_one, rel=1e-5), name
