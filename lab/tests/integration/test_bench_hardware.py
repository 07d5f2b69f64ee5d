"""A machine's figures, measured, in plans and beside steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import Megamem

from pretrain.planning.seconds.hardware import load_hardware

SIZED = ("model.vocab_size=512", "train.micro_batch_size=1", "train.global_batch_size=8")


def test_measured_hardware_is_planned_with(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    measured = megamem("bench", "hardware", "--write", path, "--nproc", 2, "--rounds", 1)
    assert measured.code == 0, measured.output
    mine, like = load_hardware(str(path)), load_hardware("h100-80g")
    assert mine.gpus_per_node == 2
    assert mine.network_gb_per_s == like.network_gb_per_s
    assert 0 < mine.memory_bandwidth_gb_per_s < like.memory_bandwidth_gb_per_s
    assert mine.matmul_fraction == 1.0
    result = megamem("plan", config_file, "--gpus", 4, "--gpu", path, "--top", 2, "--count", 0, *SIZED)
    assert result.code == 0, result.output
    assert "the fastest that fit" in result.output
    step = megamem("bench", "step", config_file, "--nproc", 2, "--rounds", 1, "--steps", 1, "--gpu", path)
    assert step.code == 0, step.output
    taken = float(re.findall(r"step ([\d.]+) ms", step.output)[0])
    names = ("predicted by megamem plan", "the memory in it", "all else")
    found = [re.findall(rf"{name} +([\d.]+) ms +\(took ([\d.]+) times", step.output)[-1] for name in names]
    whole, memory, rest = ((float(predicted), float(times)) for predicted, times in found)
    assert whole[0] == pytest.approx(memory[0] + rest[0], abs=0.02)
    # Printed to a hundredth.
    for predicted, times in (whole, memory, rest):
        assert predicted > 0
        assert times > 0
    assert whole[0] * whole[1] == pytest.approx(taken, rel=0.02, abs=0.02)
    assert memory[0] * memory[1] + rest[0] * rest[1] == pytest.approx(taken, rel=0.02, abs=0.02)
