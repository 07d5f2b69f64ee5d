"""Checkpoints go to other formats and come back, and are trained on there and here: by the commands that a person types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from commands import TINY, Megamem, checkpoint, steps, tensors


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem, corpus: Path) -> Path:
    """A dense model after three steps."""
    folder = tmp_path_factory.mktemp("dense")
    config = {
        **TINY,
        # As many as the embedding has rows: padding would not come back.
        "model": {**TINY["model"], "memory": None, "vocab_size": 384},
        "train": {**TINY["train"], "num_steps": 3},
        "optimizer": {"lr": 4e-3, "min_lr": 4e-4},
        "data": {"datasets": [{"path": str(corpus)}]},
    }
    (folder / "dense.yaml").write_text(yaml.safe_dump(config))
    result = megamem("train", folder / "dense.yaml", "--run-dir", folder / "run")
    assert result.code == 0, result.output
    return folder / "run"


def convert(megamem: Megamem, *args: object) -> str:
    result = megamem("checkpoint", "convert", *args)
    assert result.code == 0, result.output
    assert "equal, as read back" in result.output
    return result.output


def test_a_memory_model_goes_to_hugging_face_and_back(
    megamem: Megamem, saved_run: Path, corpus: Path, tmp_path: Path
) -> None:
    exported, back = tmp_path / "exported", tmp_path / "back"
    convert(megamem, saved_run, exported, "--format", "huggingface", "--max-file-size", "64KiB")
    assert {"config.json", "README.md", "tokenizer.json", "modeling_megamem.py"} <= {
        each.name for each in exported.iterdir()
    }
    assert (exported / "model.safetensors.index.json").is_file()
    output = convert(megamem, exported, back)
    assert "without optimizer state" not in output
    # The padding of the vocabulary is not exported: its rows are zeros here.
    difference = megamem("checkpoint", "diff", saved_run, back, "--weights-only")
    assert [line.split()[0] for line in difference.output.splitlines() if " differs in " in line] == [
        "embedding.word_embeddings.weight"
    ]
    original, imported = tensors(checkpoint(saved_run, 6)), tensors(checkpoint(back, 0))
    rows = "embedding.word_embeddings.weight"
    assert torch.equal(imported[rows][:257], original[f"optimizer.state.param.{rows}"][:257])
    assert not imported[rows][257:].any()
    assert megamem("checkpoint", "verify", back, "--finite").code == 0
    settings = (
        "train.num_steps=1",
        "train.global_batch_size=4",
        "train.micro_batch_size=4",
        "train.sequence_length=32",
    )
    result = megamem("train", back / "config.yaml", "--run-dir", back, f"data.datasets=[{{path: {corpus}}}]", *settings)
    assert result.code == 0, result.output
    assert steps(back)[0]["loss"] < steps(saved_run)[0]["loss"] - 0.5


def test_a_run_begins_from_weights_alone_with_fresh_moments(
    megamem: Megamem, saved_run: Path, config_file: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half"
    output = convert(megamem, saved_run, half, "--step", 3, "--weights-only")
    assert "begins with fresh moments" in output
    result = megamem(
        "train",
        config_file,
        "--run-dir",
        half,
        "train.num_steps=4",
        "checkpoint.every_steps=1",
        "optimizer.lr=1e-9",
        "optimizer.min_lr=0",
    )
    assert result.code == 0, result.output
    # The loss of the fourth step is that of the weights before it.
    assert steps(half)[0]["loss"] == steps(saved_run)[3]["loss"]
    after, before = tensors(checkpoint(half, 4)), tensors(checkpoint(saved_run, 3))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    fresh, kept = (state[f"optimizer.state.exp_avg_sq.{name}"] for state in (after, before))
    assert fresh.any()
    # A step leaves 0.95 of kept ones, whatever it adds.
    assert (fresh < 0.9 * kept).any()
    torch.testing.assert_close(after[f"optimizer.state.param.{name}"], before[f"optimizer.state.param.{name}"])


def test_a_dense_run_goes_to_a_qwen3_and_back(megamem: Megamem, dense_run: Path, tmp_path: Path) -> None:
    exported, back = tmp_path / "exported", tmp_path / "back"
    convert(megamem, dense_run, exported, "--format", "huggingface")
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert not list(exported.glob("*.py"))
    convert(megamem, exported, back)
    for made in (exported, back):
        same = megamem("checkpoint", "diff", dense_run, made, "--weights-only")
        assert same.code == 0, same.output


def test_a_memory_model_goes_to_its_release_and_back(
    megamem: Megamem, saved_run: Path, config_file: Path, tmp_path: Path
) -> None:
    released, back = tmp_path / "released", tmp_path / "back"
    convert(megamem, saved_run, released, "--format", "released")
    config = tmp_path / "table.yaml"
    config.write_text(f"base: {config_file}\nmodel: {{memory: {{shuffle: table}}}}\n")
    refused = megamem("checkpoint", "inspect", released)
    assert refused.code == 2
    assert "--config" in refused.output
    convert(megamem, released, back, "--config", config)
    stored, original = tensors(checkpoint(back, 0)), tensors(checkpoint(saved_run, 6))
    shared = {name for name in stored if f"optimizer.state.param.{name}" in original}
    assert "banks.0.values" in shared
    for name in shared:
        assert torch.equal(stored[name], original[f"optimizer.state.param.{name}"]), name


def test_what_a_format_cannot_hold_is_refused(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    for args, text in (
        (("--format", "huggingface", "--with-optimizer"), "--with-optimizer"),
        (("--format", "huggingface", "--tensor", 2), "--tensor has no effect on --format huggingface"),
        (("--format", "released", "--pipeline", 2), "--pipeline has no effect on --format released"),
        (("--config", saved_run / "config.yaml"), "has a configuration of its own"),
    ):
        result = megamem("checkpoint", "convert", saved_run, tmp_path / "out", *args)
        assert result.code == 2, result.output
        assert text in result.output
        assert not list(tmp_path.iterdir())
