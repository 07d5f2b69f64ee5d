"""Rows of `metrics.jsonl` that say how the memory was used, and their figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_runs import MEMORY, SHARED, tiny_run

from pretrain.config.schema import LoggingConfig, RunConfig
from pretrain.run.folder import RunFolder
from pretrain.train.callback import Callbacks
from pretrain.train.callbacks import MemoryUsage, default_callbacks
from pretrain.train.loop import take_step
from pretrain.train.trackers import MetricsFile

FIGURES = {"coverage", "even_coverage", "kl_to_uniform", "top1_score", "topk_score", "output_std", "singular_values"}


def rows_of(config: RunConfig, folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Train with the callbacks that measure and write, as the loop does."""
    with tiny_run(config) as built:
        run = replace(built.run, folder=RunFolder(folder))
        measuring = Callbacks(c for c in default_callbacks(run) if isinstance(c, MemoryUsage | MetricsFile))
        measuring.on_start(run)
        for _ in range(num_steps):
            _, row = take_step(run, built.batches)
            measuring.on_step(run, row)
    return [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]


def test_observed_steps_have_a_row_with_every_layers_figures(run_ranks: Any, tmp_path: Path) -> None:
    config = replace(SHARED, logging=LoggingConfig(every_steps=2, memory_every_steps=3))
    (rows,) = run_ranks(lambda: rows_of(config, tmp_path, 6), 1)
    assert [row["step"] for row in rows] == [2, 3, 4, 6]
    assert [row["step"] for row in rows if "memory" in row] == [3, 6]
    for row in rows:
        if "memory" in row:
            assert set(row["memory"]) == {"0", "1", "2", "3"}
            for figures in row["memory"].values():
                assert set(figures) == FIGURES
                assert len(figures["singular_values"]) == MEMORY.num_heads
                assert figures["top1_score"] >= figures["topk_score"]
    # The gains were calibrated to a mean score of 1, and have had three small steps to move.
    scores = [figures["topk_score"] for figures in rows[1]["memory"].values()]
    assert 0.7 < sum(scores) / len(scores) < 1.4


def test_losses_are_in_every_row_and_usage_can_be_off(run_ranks: Any, tmp_path: Path) -> None:
    memory = replace(MEMORY, key_balance_weight=0.1)
    config = replace(SHARED, model=replace(SHARED.model, memory=memory), logging=LoggingConfig(memory_every_steps=0))
    (rows,) = run_ranks(lambda: rows_of(config, tmp_path, 2), 1)
    for row in rows:
        assert {frozenset(figures) for figures in row["memory"].values()} == {frozenset({"key_balance"})}
        of_layers = [figures["key_balance"] for figures in row["memory"].values()]
        assert abs(row["key_balance"] - sum(of_layers) / len(of_layers)) < 1e-9
        assert "tucker_penalty" not in row
