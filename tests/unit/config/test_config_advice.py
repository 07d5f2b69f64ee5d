"""Advice is given on what could run faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config.schedule import backbone_lr
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


@pytest.mark.parametrize(
    ("keys", "is_told"),
    [
        ("train.num_steps=30", True),
        ("train.num_steps=31", True),
        ("train.num_steps=32", False),
        ("train.num_steps=30 optimizer.schedule=constant", False),
        ("train.num_steps=30 optimizer.min_lr=4e-3", False),
        ("train.num_steps=1 optimizer.warmup_steps=0", False),
    ],
)
def test_a_warm_up_that_takes_the_whole_run_is_told(keys: str, is_told: bool) -> None:
    """As the rates of the last steps are: whoever reads the note finds `lr` there."""
    config = load_config(CONFIGS / "quickstart_long.yaml", keys.split())
    sentences = list(advice(config, on_gpu=False))
    assert bool(sentences) == is_told
    if is_told:
        num_steps = config.train.num_steps
        assert sentences[0].startswith(
            f"optimizer.warmup_steps 30 leave the cosine none of the {num_steps} steps to fall in"
        )
        assert backbone_lr(num_steps - 1, config.optimizer, num_steps) == config.optimizer.lr


def test_a_stage_is_told_of_its_own_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(
        f"base: {CONFIGS / 'quickstart_long.yaml'}\nstages:\n"
        "  - {name: first, num_steps: 100}\n  - {name: short, num_steps: 30}\n"
    )
    assert cli.main(["config", "check", str(path), "--elsewhere"]) == 0
    (note,) = (line for line in capsys.readouterr().err.splitlines() if "warmup" in line)
    assert "none of the 30 steps to fall in" in note


@pytest.mark.parametrize(
    "name", ["quickstart", "quickstart_dense", "quickstart_long", "ultramemv2/227m_1.2b", "memory_plus/2.5b_25b"]
)
def test_nothing_is_said_of_what_is_well(name: str) -> None:
    assert not list(advice(load_config(CONFIGS / f"{name}.yaml")))
