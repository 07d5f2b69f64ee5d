"""`megamem upscale` as a user meets it: a run is grown, and the grown model is trained."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from commands import Megamem

MEMORY = ("model.memory.kind=midus", "model.memory.num_heads=4", "model.memory.num_keys=8", "model.memory.value_dim=16")


def test_a_run_is_grown_and_goes_on_from_there(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    base, grown, more = tmp_path / "base", tmp_path / "grown", tmp_path / "more"
    steps = ("train.num_steps=4", "checkpoint.every_steps=4")
    result = megamem("train", config_file, "--run-dir", base, "model.memory=null", *steps)
    assert result.code == 0, result.output
    result = megamem("upscale", base, "--output", grown, "--blocks", 2, *MEMORY)
    assert result.code == 0, result.output
    assert "4 blocks + 2: new ones are 1, 4, counted from 0" in result.output
    training = yaml.safe_load((grown / "train.yaml").read_text(encoding="utf-8"))
    assert training == {"base": "config.yaml", "optimizer": {"trained_layers": [2, 5]}}
    losses = []
    for run in (base, grown):
        result = megamem("eval", run, "--json")
        assert result.code == 0, result.output
        losses.append(json.loads(result.output[result.output.index("{") :])["validation_loss"])
    assert losses[0] == losses[1]

    result = megamem("train", grown / "train.yaml", "--from", grown, "--run-dir", more, *steps)
    assert result.code == 0, result.output
    result = megamem("checkpoint", "diff", grown, more, "--weights-only")
    changed = {line.split()[0] for line in result.output.splitlines() if " differs in " in line}
    assert "banks.0.values" in changed
    assert [name for name in changed if not name.startswith(("decoder.layers.1.", "decoder.layers.4.", "banks."))] == []

    copies = tmp_path / "copies"
    result = megamem("upscale", base, "--output", copies, "--blocks", 2, "--insert", "solar")
    assert result.code == 0, result.output
    assert f"to train all of it: megamem train {copies / 'train.yaml'}" in result.output
    assert yaml.safe_load((copies / "train.yaml").read_text(encoding="utf-8")) == {"base": "config.yaml"}

    again = megamem("upscale", base, "--output", grown, "--blocks", 2, *MEMORY)
    assert again.code == 2
    assert f"{grown} is there already" in again.output
    result = megamem("upscale", grown, "--output", tmp_path / "twice", "--blocks", 1, *MEMORY)
    assert result.code == 2
    assert "has a memory of kind midus" in result.output
