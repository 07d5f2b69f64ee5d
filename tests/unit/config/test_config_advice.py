"""Advice is given on what could run faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config.stages import load_config
from pretrain.config.validate import advice
from tools import cli

CONFIGS = Path(__file__).parents[3] / "configs"


def test_rows_that_lose_wide_loads_are_told_with_a_size_that_keeps_them(capsys: pytest.CaptureFixture[str]) -> None:
    path = CONFIGS / "ultramemv2" / "2.5b_120b_top256.yaml"
    assert not list(advice(load_config(path)))
    config = load_config(path, ["parallel.memory=16"])
    (sentence,) = advice(config)
    assert "parallel.memory 16 leaves every rank 60 columns of model.memory.value_dim (120 bytes)" in sentence
    assert "parallel.memory 8 or widths that are multiples of 128" in sentence
    assert not list(advice(replace(config, parallel=replace(config.parallel, memory=8))))
    assert cli.main(["config", "check", str(path), "--elsewhere", "parallel.memory=16"]) == 0
    assert "note: parallel.memory 16 leaves" in capsys.readouterr().err


def test_parts_of_rows_leave_wider_columns() -> None:
    path = CONFIGS / "ultramemv2" / "2.5b_120b_top256.yaml"
    assert not list(advice(load_config(path, ["parallel.memory=16", "parallel.memory_rows=2"])))
    (sentence,) = advice(load_config(path, ["parallel.memory=32", "parallel.memory_rows=2"]))
    assert sentence.startswith(
        "parallel.memory 32 / memory_rows 2 leaves every rank 60 columns of model.memory.value_dim"
    )
    assert "parallel.memory 16 or widths that are multiples of 128" in sentence


@pytest.mark.parametrize("name", ["quickstart", "quickstart_dense", "ultramemv2/227m_1.2b", "memory_plus/2.5b_25b"])
def test_nothing_is_said_of_what_is_well(name: str) -> None:
    assert not list(advice(load_config(CONFIGS / f"{name}.yaml")))
