"""configs/stages/: the models of the papers' own files, in phases of the tokens that the paper gives."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megamem.config.model import ModelConfig
from pretrain.config.position import tokens_of_run
from pretrain.config.stages import load_config, load_stages
from pretrain.config.validate import validate
from pretrain.run.preflight import check_gpu_memory

CONFIGS = Path(__file__).parents[2] / "configs"
PATHS = sorted(path for path in (CONFIGS / "stages").glob("*.yaml") if path.name != "three_phases.yaml")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_phases_are_the_papers_on_the_gpus_of_the_model(path: Path) -> None:
    stages = load_stages(path)
    alone = CONFIGS / "ultramemv2" / path.name
    gpus = re.search(r"^# For (\d+) GPUs", alone.read_text(), flags=re.MULTILINE)
    assert gpus is not None
    assert f"on the {gpus[1]} GPUs of its own file" in path.read_text()
    tokens = []
    for config in stages:
        validate(config, int(gpus[1]))
        check_gpu_memory(config, int(gpus[1]), int(80e9))
        base = replace(config.model, rotary_base=ModelConfig.rotary_base)
        assert base == load_config(alone).model
        assert config.stage is not None
        of_stage = tokens_of_run(config.train, config.stage, config.train.num_steps) - config.stage.tokens_before
        tokens.append(of_stage)
    assert tokens == pytest.approx([1.6e12, 250e9, 500e9], rel=2e-5)
    assert [config.optimizer.schedule for config in stages] == ["constant", "cosine", "constant"]
    assert [config.train.sequence_length for config in stages] == [4096, 4096, 32768]
