"""A run that predicts further tokens, and its commands: its rows, and who leaves the branch out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from commands import Megamem, steps
from safetensors import safe_open

AHEAD = "model.multi_token_prediction={depth: 2, loss_weight: 0.3}"


def test_commands_leave_the_branch_out(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    options = (AHEAD, "train.num_steps=4", "parallel.pipeline=2", "--nproc", 2)
    result = megamem("train", config_file, "--run-dir", run, *options)
    assert result.code == 0, result.output
    rows = steps(run)
    # Before anything is learnt, normed states of 32 columns make logits with a variance of 2 / 5 for 384 padded ids.
    expected = pytest.approx(math.log(384) + 0.2, abs=0.2)
    assert rows[0]["loss_ahead"] == {"1": expected, "2": expected}
    evaluated = megamem("eval", run, "--json", "--nproc", 1)
    assert evaluated.code == 0, evaluated.output
    assert "loss_ahead" not in json.loads(evaluated.last_line)
    said = megamem("generate", run, "--prompt", "def", "--max-tokens", 4)
    assert said.code == 0, said.output
    converted = megamem("checkpoint", "convert", run, exported, "--format", "huggingface")
    assert converted.code == 0, converted.output
    (weights,) = exported.glob("*.safetensors")
    with safe_open(weights, "pt") as file:
        names = list(file.keys())
    assert names
    assert not [name for name in names if "multi_token" in name]
    again = json.loads((exported / "config.json").read_text())["native"]["model"]
    assert again["multi_token_prediction"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("model.tied_embeddings=false", "parallel.pipeline=2"),
            "model.multi_token_prediction is set with model.tied_embeddings false, but parallel.pipeline is 2",
        ),
        (
            ("model.moe={num_experts: 4, top_k: 2}",),
            "model.multi_token_prediction is set with model.moe, and its blocks have no mixture of experts",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    options: tuple[str, ...], message: str, config_file: Path, tmp_path: Path, megamem: Megamem
) -> None:
    result = megamem("train", config_file, AHEAD, *options, "--nproc", 2, "--run-dir", tmp_path / "run")
    assert result.code == 2
    assert message in " ".join(result.output.split())
