"""A run of one engine goes on with another: Megatron-core of this environment, and that of a second one."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import Megamem, checkpoint, steps, tensors

REPOSITORY = Path(__file__).parents[2]
OTHER = os.environ.get("MEGAMEM_OTHER_PYTHON", "")
# Builds of torch round differently, and Adam's first updates of small gradients are large.
LOSS, TENSOR = 1e-5, 1e-3


def other_megamem(*args: object) -> None:
    ended = subprocess.run(
        [OTHER, "-m", "megamem", *map(str, args)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def first_half(run: Path, to: Path) -> Path:
    """A copy of a run of six steps as it was after three."""
    shutil.copytree(run, to)
    shutil.rmtree(checkpoint(to, 6))
    return to


def assert_nearly_the_same(actual: Path, expected: Path) -> None:
    left, right = steps(actual), steps(expected)
    assert [row["step"] for row in left] == [row["step"] for row in right] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in left] == pytest.approx([row["loss"] for row in right], rel=LOSS)
    of_left, of_right = tensors(checkpoint(actual, 6)), tensors(checkpoint(expected, 6))
    assert of_left.keys() == of_right.keys()
    differences = {
        name: float((of_left[name] - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
        for name, wanted in of_right.items()
        if wanted.is_floating_point()
    }
    assert {name: value for name, value in differences.items() if value > TENSOR} == {}


def engine_of(python: str) -> str:
    code = "import importlib.metadata as metadata; print(metadata.version('megatron-core'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(
    not OTHER, reason="MEGAMEM_OTHER_PYTHON names no environment with another engine (`make test-ranks`)"
)
def test_a_run_goes_on_with_the_other_engine(
    saved_run: Path, config_file: Path, megamem: Megamem, tmp_path: Path
) -> None:
    if engine_of(OTHER) == version("megatron-core"):
        pytest.skip(f"{OTHER} has the same engine as this environment")
    options = ("train.num_steps=6", "checkpoint.every_steps=3")

    mine = first_half(saved_run, tmp_path / "mine")
    other_megamem("train", config_file, "--run-dir", mine, *options)
    assert_nearly_the_same(mine, saved_run)

    whole = tmp_path / "whole"
    other_megamem("train", config_file, "--run-dir", whole, *options)
    assert_nearly_the_same(whole, saved_run)

    theirs = first_half(whole, tmp_path / "theirs")
    result = megamem("train", config_file, "--run-dir", theirs, *options)
    assert result.code == 0, result.output
    assert "resuming from" in result.output
    assert_nearly_the_same(theirs, whole)
