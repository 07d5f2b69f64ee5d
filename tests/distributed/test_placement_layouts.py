"""Memories in some blocks only: the same run on every layout, also where a stage has none."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamem.config.model import MoEConfig
from megamem.placement.sharing import SharingConfig
from megamem.placement.spans import PlacementConfig
from pretrain.config.schema import ParallelConfig, RunConfig
from tests.distributed.tiny_runs import MEMORY, SHARED, tiny_run
from tests.rotation import in_rotation


def placed(placement: PlacementConfig, sharing: SharingConfig | None = None) -> RunConfig:
    memory = replace(MEMORY, placement=placement, sharing=sharing or SharingConfig())
    return replace(SHARED, model=replace(SHARED.model, num_layers=8, memory=memory))


def on(config: RunConfig, **layout: int) -> RunConfig:
    return replace(config, parallel=ParallelConfig(**layout))


def train(config: RunConfig, num_steps: int = 2) -> list[tuple[float, float]]:
    with tiny_run(config) as run:
        return run.train(num_steps)


@pytest.mark.parametrize(
    "config",
    in_rotation(
        [
            pytest.param(placed(PlacementConfig(every=2), SharingConfig("block", 2)), id="every second, shared"),
            pytest.param(placed(PlacementConfig(blocks=(5, 6)), SharingConfig("ring", 2)), id="the second stage alone"),
            pytest.param(placed(PlacementConfig(blocks=(0, 6), position="instead")), id="instead of the feed-forward"),
        ]
    ),
)
def test_no_layout_changes_a_run(run_ranks: Any, config: RunConfig) -> None:
    (alone,) = run_ranks(lambda: train(config), 1)
    layouts: tuple[dict[str, int], ...] = ({"tensor": 2}, {"pipeline": 2}, {})
    for run in run_ranks(lambda: [train(on(config, **layout)) for layout in layouts], 2)[0]:
        for actual, expected in zip(run, alone, strict=True):
            assert actual == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_of_a_stage_without_memory_goes_on_elsewhere(run_ranks: Any, tmp_path: Path) -> None:
    config = placed(PlacementConfig(spans="4:6/5:7"))

    def save() -> list[tuple[float, float]]:
        with tiny_run(on(config, pipeline=2)) as run:
            run.train(2)
            run.save(tmp_path)
            return run.train(2)

    def resume() -> list[tuple[float, float]]:
        with tiny_run(config) as run:
            run.resume(tmp_path / "step_00000002")
            return run.train(2)

    expected = run_ranks(save, 2)[0]
    for actual, reference in zip(run_ranks(resume, 1)[0], expected, strict=True):
        assert actual == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize(("recompute", "layout"), in_rotation([("none", {"pipeline": 2}), ("full", {"tensor": 2})], 2))
def test_they_train_in_bf16(run_ranks: Any, recompute: Any, layout: dict[str, int]) -> None:
    moe = MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=24)
    config = placed(PlacementConfig(spans="0:2/1:3/5:5"))
    config = replace(
        config,
        model=replace(config.model, moe=moe),
        train=replace(config.train, precision="bf16", recompute=recompute),
    )
    assert all(math.isfinite(value) for step in run_ranks(lambda: train(on(config, **layout)), 2)[0] for value in step)
