"""A trained model is taught a few facts by rows of its tables alone; the patch makes the taught model of the trained one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from commands import Megamem, checkpoint, evaluations, steps, tensors

from pretrain.data.prepare import prepare
from pretrain.data.sources import PairFields
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint

NUM_ROWS, NUM_LAYERS, TOP_K, LENGTH = 2 * 32 * 32, 2, 8, 32


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, warm: None) -> list[Path]:
    """Two batches of prompts and answers."""
    folder = tmp_path_factory.mktemp("facts")
    for name, letters in (("first", "abcdefgh"), ("second", "stuvwxyz")):
        lines = [json.dumps({"q": f"key {a}{b}: ", "a": f"{b}{a}{b}"}) for a in letters for b in letters]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        source = str(folder / f"{name}.jsonl")
        prepare(
            [source], folder / name, ByteTokenizer(), pair=PairFields("q", "a"), validation_fraction=0, num_workers=1
        )
    return [folder / "first", folder / "second"]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, megamem: Megamem, trained: Path) -> Path:
    """Reads of the run's own text."""
    path = tmp_path_factory.mktemp("known") / "known.npz"
    result = megamem("patch", "counts", trained, "--sequences", 41, "--nproc", 2, "--output", path)
    assert result.code == 0, result.output
    assert f"counting reads in 42 sequences of {LENGTH} tokens" in result.output
    assert f"bank 0: {42 * LENGTH * NUM_LAYERS * TOP_K:,} reads of" in result.output
    return path


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


def test_reads_are_counted_alike_by_any_number_of_ranks(
    megamem: Megamem, trained: Path, known: Path, tmp_path: Path
) -> None:
    result = megamem("patch", "counts", trained, "--sequences", 42, "--nproc", 1, "--output", tmp_path / "one.npz")
    assert result.code == 0, result.output
    one, two = arrays(tmp_path / "one.npz"), arrays(known)
    assert one.keys() == two.keys() == {"num_sequences", "reads.banks.0", "sequences.banks.0"}
    assert all(np.array_equal(one[name], two[name]) for name in one)
    reads, sequences = two["reads.banks.0"], two["sequences.banks.0"]
    assert reads.sum() == 42 * LENGTH * NUM_LAYERS * TOP_K
    assert len(reads) == NUM_ROWS
    assert two["num_sequences"].tolist() == [42]
    # A row that is read is read in some sequence, and in no more sequences than there are.
    assert ((sequences > 0) == (reads > 0)).all()
    assert (sequences <= np.minimum(reads, 42)).all()
    assert sequences.max() > sequences[sequences > 0].min()


@pytest.fixture(scope="module")
def taught(
    tmp_path_factory: pytest.TempPathFactory,
    megamem: Megamem,
    trained: Path,
    known: Path,
    facts: list[Path],
    corpus: Path,
) -> Path:
    """Both batches, one after the other, with evaluations on them and on what was known."""
    folder = tmp_path_factory.mktemp("taught")
    saved = find_checkpoint(RunFolder(trained), None).config
    entries = [{"path": str(path)} for path in (*facts, corpus)]
    config: dict[str, Any] = {
        "model": saved["model"],
        "train": {"global_batch_size": 4, "micro_batch_size": 4, "sequence_length": LENGTH},
        "optimizer": {
            "schedule": "constant",
            "tables": "row_wise",
            "table_gradients": "rows",
            "value_lr": 0.05,
            "pre_value_lr_multiplier": None,
            "value_weight_decay": 0,
            "trained_rows": {"number": 60, "background": str(known)},
        },
        "data": {"datasets": entries[:1], "documents": "separate"},
        "evaluation": {"datasets": entries, "max_sequences": 70},
        "stages": [{"name": path.name, "num_steps": 30, "data": {"datasets": [{"path": str(path)}]}} for path in facts],
    }
    (folder / "teach.yaml").write_text(yaml.safe_dump(config))
    result = megamem("train", folder / "teach.yaml", "--from", trained, "--run-dir", folder / "run", "--nproc", 1)
    assert result.code == 0, result.output
    # A few texts read few rows, and keys that are not trained have not collapsed.
    assert "collapsed" not in result.output
    return folder / "run"


def test_each_batch_is_learnt_and_the_rest_stays(trained: Path, taught: Path) -> None:
    losses = [row["domains"] for row in evaluations(taught)]
    assert [set(each) for each in losses] == [{"first", "second", "data"}] * 2
    first, second = losses
    assert second["second"]["validation_loss"] < first["second"]["validation_loss"] - 0.2
    assert steps(taught)[-1]["loss"] < steps(taught)[30]["loss"]
    before, after = tensors(checkpoint(trained, 160)), tensors(checkpoint(taught, 220))
    for name, tensor in before.items():
        if name.startswith("optimizer.state.param.banks."):
            rows = int((after[name] != tensor).any(1).sum())
            assert 0 < rows <= 60 * 60
            assert rows < len(tensor)
        elif name.startswith("optimizer.state.param."):
            assert np.array_equal(after[name.removeprefix("optimizer.state.param.")].numpy(), tensor.numpy()), name


def losses_of(megamem: Megamem, run: Path, facts: list[Path]) -> Any:
    """Losses on both batches, whose documents the taught run reads apart."""
    named = ("--data", facts[0], "--data", facts[1])
    result = megamem("eval", run, *named, "--nproc", 1, "--json", "data.documents=separate")
    assert result.code == 0, result.output
    return json.loads(result.output.splitlines()[-1])["domains"]


def test_the_patch_makes_the_taught_model_of_the_trained_one(
    megamem: Megamem, trained: Path, taught: Path, facts: list[Path], tmp_path: Path
) -> None:
    patch = tmp_path / "facts.safetensors"
    made = megamem("patch", "make", trained, taught, "--output", patch)
    assert made.code == 0, made.output
    assert "banks.0.values: " in made.output
    applied = megamem("patch", "apply", patch, trained, "--output", tmp_path / "patched")
    assert applied.code == 0, applied.output
    assert losses_of(megamem, tmp_path / "patched", facts) == losses_of(megamem, taught, facts)
    assert losses_of(megamem, tmp_path / "patched", facts) != losses_of(megamem, trained, facts)
    reverted = megamem("patch", "revert", patch, tmp_path / "patched")
    assert reverted.code == 0, reverted.output
    assert megamem("checkpoint", "diff", trained, tmp_path / "patched").code == 0


def test_rows_taught_in_bf16_go_into_fp32_main_weights_and_out_again(
    megamem: Megamem, config_file: Path, facts: list[Path], tmp_path: Path
) -> None:
    """Rows that were not trained are those of before, once they are rounded: the patch has the trained ones alone."""
    base, taught, patch = tmp_path / "base", tmp_path / "taught", tmp_path / "facts.safetensors"
    options = ("train.precision=bf16", "--nproc", 1)
    made = megamem("train", config_file, "--run-dir", base, "train.num_steps=4", *options)
    assert made.code == 0, made.output
    rows = ("optimizer.tables=row_wise", "optimizer.table_gradients=rows", "optimizer.value_weight_decay=0")
    data = f"data.datasets=[{{path: {facts[0]}}}]"
    chosen = "optimizer.trained_rows={number: 9, score: reads}"
    result = megamem(
        "train", config_file, "--from", base, "--run-dir", taught, "train.num_steps=3", *rows, chosen, data, *options
    )
    assert result.code == 0, result.output
    assert megamem("patch", "make", base, taught, "--output", patch).code == 0
    shown = json.loads(megamem("patch", "show", patch, "--json").output)
    # Two banks of two tables, three steps of nine rows.
    assert len(shown["tables"]) == 4
    assert all(0 < each["rows"] <= 27 and each["before"] == "float32" for each in shown["tables"].values())
    before = tensors(checkpoint(base, 4))
    assert megamem("patch", "apply", patch, base).code == 0
    patched, after = tensors(checkpoint(base, 4)), tensors(checkpoint(taught, 7))
    for name in (name for name in before if name.startswith("optimizer.state.param.banks.")):
        assert torch.equal(patched[name].bfloat16(), after[name])
        assert not torch.equal(patched[name], before[name])
    assert megamem("patch", "revert", patch, base).code == 0
    again = tensors(checkpoint(base, 4))
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


def test_what_cannot_be_counted_is_refused(
    megamem: Megamem, trained: Path, config_file: Path, known: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("many words " * 200)
    other = tmp_path / "other"
    result = megamem("data", "tokenizer", text, "--vocab-size", 300, "--output", tmp_path / "tokens.json")
    assert result.code == 0, result.output
    result = megamem("data", "prepare", text, "--tokenizer", tmp_path / "tokens.json", "--output", other)
    assert result.code == 0, result.output
    dense = tmp_path / "dense"
    made = megamem("train", config_file, "--run-dir", dense, "train.num_steps=4", "model.memory=null", "--nproc", 1)
    assert made.code == 0, made.output
    for words, said in (
        ((trained, "--output", known), ("which is there", str(known))),
        ((trained, "--data", tmp_path / "none", "--output", tmp_path / "a.npz"), ("none",)),
        ((trained, "--data", other, "--output", tmp_path / "a.npz"), ("another tokenizer", str(other))),
        ((dense, "--output", tmp_path / "a.npz"), ("without memory",)),
        ((tmp_path / "no-run", "--output", tmp_path / "a.npz"), ("no such run folder",)),
        ((trained, "--sequences", 0, "--output", tmp_path / "a.npz"), ("--sequences",)),
    ):
        refused = megamem("patch", "counts", *words)
        assert refused.code in (2, 3, 4), refused.output
        assert "Traceback" not in refused.output
        assert all(word in refused.output for word in said), refused.output
        assert not (tmp_path / "a.npz").exists()
