"""Two phases on prompts and answers: the upper layers, and then all of the model. Killed anywhere, it is the same run."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from commands import TINY, Megamem, assert_same_tensors, checkpoint, evaluations, steps, tensors
from test_stages import EndOfRank, with_callback

from megamem.parameters.trained_part import ALL, Trained
from pretrain.checkpoint.folder import read_state
from pretrain.data.prepare import prepare
from pretrain.data.sources import PairFields
from pretrain.data.tokenizer import ByteTokenizer

TRAINED = ("decoder.layers.2.", "decoder.layers.3.", "banks.1.")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, warm: None) -> Path:
    """Sums and their results."""
    folder = tmp_path_factory.mktemp("pairs")
    numbers = np.random.RandomState(5).randint(0, 500, (400, 2)).tolist()
    lines = [json.dumps({"q": f"{a} and {b} are ", "a": str(a + b)}) for a, b in numbers]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    names = PairFields("q", "a")
    prepare([str(folder / "sums.jsonl")], folder / "data", ByteTokenizer(), pair=names, num_workers=1)
    return folder / "data"


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory, pairs: Path) -> Path:
    config: dict[str, Any] = {
        **TINY,
        "train": {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 32},
        "parallel": {"pipeline": 2},
        "optimizer": {"lr": 4e-3, "schedule": "constant"},
        "data": {"datasets": [{"path": str(pairs)}], "documents": "separate"},
        "checkpoint": {"every_steps": 2, "keep_last": 0},
        "stages": [
            {"name": "inserted", "num_steps": 4, "optimizer": {"trained_layers": [3, 4], "retrieval_lr": 5e-3}},
            {"name": "all", "num_steps": 4, "optimizer": {"schedule": "cosine", "min_lr": 4e-4}},
        ],
    }
    path = tmp_path_factory.mktemp("phases") / "phases.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def straight(phases: Path, tmp_path_factory: pytest.TempPathFactory, megamem: Megamem) -> Path:
    path = tmp_path_factory.mktemp("straight") / "run"
    result = megamem("train", phases, "--run-dir", path, "--nproc", 2)
    assert result.code == 0, result.output
    return path


def test_the_first_phase_moves_its_layers_alone(straight: Path) -> None:
    before, after = tensors(checkpoint(straight, 4)), tensors(checkpoint(straight, 8))
    stepped = {name.removeprefix("optimizer.state.param.") for name in before if ".param." in name}
    assert stepped
    assert all(name.startswith(TRAINED) for name in stepped)
    frozen = {name for name in before if not name.startswith("optimizer.")}
    assert {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} <= frozen
    assert not any(name.startswith(TRAINED) and name.endswith("weight") for name in frozen)
    earlier = tensors(checkpoint(straight, 2))
    for name, tensor in earlier.items():
        # Layers' memories of their own weights may change where these do.
        if not (name in frozen and name.startswith(TRAINED)):
            assert torch.equal(tensor, before[name]) == (name in frozen), name
    assert {name.removeprefix("optimizer.state.param.") for name in after if ".param." in name} >= stepped
    assert read_state(checkpoint(straight, 8)).run.trained == ((0, Trained((3, 4))), (4, ALL))
    assert [row["validation_loss"] > 0 for row in evaluations(straight)] == [True, True]


@pytest.mark.parametrize(("step", "moment"), [(3, "within"), (5, "opened")])
def test_a_run_that_is_killed_is_the_run_that_was_not(
    straight: Path, phases: Path, tmp_path: Path, megamem: Megamem, step: int, moment: str
) -> None:
    path = tmp_path / "run"
    end = EndOfRank(step, moment, signal.SIGKILL)
    result = megamem("train", phases, "--nproc", 2, "--run-dir", path, before=partial(with_callback, end, 1))
    assert result.code == 1, result.output
    result = megamem("train", phases, "--nproc", 2, "--run-dir", path)
    assert result.code == 0, result.output
    assert steps(path) == steps(straight)
    assert evaluations(path) == evaluations(straight)
    assert_same_tensors(checkpoint(path, 8), checkpoint(straight, 8))


def test_another_layout_is_the_same_run_to_rounding(
    straight: Path, phases: Path, tmp_path: Path, megamem: Megamem
) -> None:
    run = tmp_path / "run"
    layouts = ("stages.inserted.parallel={pipeline: 1, context: 2}", "stages.all.parallel={pipeline: 1, tensor: 2}")
    result = megamem("train", phases, "--run-dir", run, "--nproc", 2, *layouts)
    assert result.code == 0, result.output
    for key in ("loss", "grad_norm"):
        actual, expected = ([row[key] for row in steps(path)] for path in (run, straight))
        assert actual == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_of_a_part_is_inspected_verified_converted_and_evaluated(
    straight: Path, tmp_path: Path, megamem: Megamem
) -> None:
    path = checkpoint(straight, 4)
    for command in (
        ("checkpoint", "inspect", path),
        ("checkpoint", "verify", path),
        ("checkpoint", "convert", path, tmp_path / "weights", "--weights-only"),
        ("checkpoint", "convert", path, tmp_path / "all"),
        ("eval", straight, "--step", 4, "--nproc", 1),
    ):
        result = megamem(*command)
        assert result.code == 0, (command, result.output)
    expected = {
        name.removeprefix("optimizer.state.param."): t for name, t in tensors(path).items() if "exp_avg" not in name
    }
    for name, tensor in tensors(checkpoint(tmp_path / "weights", 4)).items():
        assert torch.equal(tensor, expected[name]), name
