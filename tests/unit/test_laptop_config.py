"""The model of four billion parameters fits a laptop: what it holds does not grow beyond its weights and rows' state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megamem.families.engram.config import EngramConfig
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.config.validate import validate
from pretrain.planning.costs.formulas import count_parameters
from pretrain.planning.costs.memory import MemoryPart, stage_bytes

CONFIG = load_config(Path(__file__).parents[2] / "configs" / "laptop" / "4b.yaml")


def with_rows(rows_per_head: int) -> RunConfig:
    memory = CONFIG.model.memory
    assert isinstance(memory, EngramConfig)
    return replace(CONFIG, model=replace(CONFIG.model, memory=replace(memory, rows_per_head=rows_per_head)))


def test_four_billion_parameters_take_ten_gigabytes() -> None:
    config = replace(CONFIG, model=replace(CONFIG.model, vocab_size=4096))
    validate(config, 1)
    counts = count_parameters(config.model)
    assert counts.total > 4e9
    (held,) = stage_bytes(config, 1, on_gpu=False)
    assert held.total < 10e9
    tables = held.by_part[MemoryPart.TABLES] + held.by_part[MemoryPart.TABLE_OPTIMIZER]
    assert tables == pytest.approx((2 + 8 / 64) * counts.tables, rel=1e-6)


def test_gradients_take_what_is_read_whatever_the_rows() -> None:
    large, small = (
        stage_bytes(replace(config, model=replace(config.model, vocab_size=4096)), 1, on_gpu=False)[0]
        for config in (with_rows(3920000), with_rows(39200))
    )
    gradients = {each.by_part[MemoryPart.TABLE_GRADIENTS] for each in (large, small)}
    assert len(gradients) == 1
    assert 0 < gradients.pop() < 0.1e9
