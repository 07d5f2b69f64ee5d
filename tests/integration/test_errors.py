"""Mistakes that a user can make end with their exit code, one message that names the fix, and nothing lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import Megamem

import pretrain.train.loop


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train.num_stepz=3",), ("train.num_stepz", "train.num_steps")),
        (("train.num_steps=many",), ("train.num_steps", "many")),
        (("parallel.tensor=3", "train.sequence_length=48"), ("model.num_attention_heads is 4", "parallel.tensor 3")),
        (("parallel.tensor=2", "--nproc", 3), ("3 ranks", "start 2 or 4 ranks")),
        (("parallel.pipeline=4",), ("model.memory.sharing.group is 2", "pipeline 2 x virtual_pipeline 1")),
        (("parallel.pipeline=2", "parallel.virtual_pipeline=2"), ("would split a group", "nearest layouts")),
        (
            ("model.memory=null", "parallel.pipeline=2", "parallel.virtual_pipeline=2", "train.global_batch_size=12"),
            ("train.global_batch_size is 12", "parallel.virtual_pipeline 2"),
        ),
        (("parallel.virtual_pipeline=2",), ("parallel.virtual_pipeline", "parallel.pipeline is above 1")),
        (("parallel.context=2", "train.sequence_length=30"), ("train.sequence_length is 30", "use 28 or 32")),
        (("model.vocab_size=200",), ("model.vocab_size is 200", "257")),
        (("--nproc", 0), ("--nproc", "0 ranks")),
        (("--nprok", 2), ("--nprok", "--nproc")),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_configuration(
    megamem: Megamem, config_file: Path, tmp_path: Path, arguments: tuple[object, ...], words: tuple[str, ...]
) -> None:
    result = megamem("train", config_file, *arguments, "--run-dir", tmp_path / "run")
    assert result.code == 2, result.output
    assert all(word in result.output for word in words), result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("checkpoints/step_00000009", "has no checkpoint of step 9: there are 3, 6"),
        ("checkpoints", "has no checkpoint yet"),
        ("gone/checkpoints/step_00000009", "gone: no such run folder"),
    ],
)
def test_a_checkpoint_to_go_on_from_that_is_not_there(
    megamem: Megamem, config_file: Path, saved_run: Path, tmp_path: Path, path: str, words: str
) -> None:
    result = megamem("train", config_file, "--from", saved_run / path, "--run-dir", tmp_path / "run")
    assert result.code == 4, result.output
    assert words in result.output
    assert not (tmp_path / "run").exists()


def test_missing_configuration(megamem: Megamem, tmp_path: Path) -> None:
    result = megamem("train", tmp_path / "none.yaml")
    assert result.code == 2
    assert "none.yaml" in result.output


@pytest.fixture
def damaged(corpus: Path, tmp_path: Path) -> Path:
    """A copy of the data set to damage."""
    return Path(shutil.copytree(corpus, tmp_path / "damaged"))


def put_token_id(data: Path, split: str, token_id: int) -> None:
    """Make every token of a split this id, as another tokenizer could have."""
    path = data / f"{split}.bin"
    # Ids of 257 tokens are stored in two bytes.
    np.full(path.stat().st_size // 2, token_id, dtype=np.uint16).tofile(path)


def train_on(megamem: Megamem, config_file: Path, data: Path, run: Path, *more: object) -> str:
    """The message of a run that must end with a data error."""
    data_option = f"data.datasets=[{{path: {data}}}]"
    result = megamem("train", config_file, "--run-dir", run, data_option, *more)
    assert result.code == 3, result.output
    assert "Traceback" not in result.output
    assert str(data) in result.output[result.output.rindex("megamem: error:") :]
    assert not (run / "checkpoints").exists()
    return result.output


def test_missing_data(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    assert "no such data set" in train_on(megamem, config_file, tmp_path / "none", tmp_path / "run", "--nproc", 2)


def test_half_written_data(megamem: Megamem, config_file: Path, tmp_path: Path, damaged: Path) -> None:
    (damaged / "manifest.json").unlink()
    assert "not a prepared data set" in train_on(megamem, config_file, damaged, tmp_path / "run")


def test_truncated_data(megamem: Megamem, config_file: Path, tmp_path: Path, damaged: Path) -> None:
    with open(damaged / "train.bin", "r+b") as stream:
        stream.truncate(100)
    assert "train.bin has 100 bytes" in train_on(megamem, config_file, damaged, tmp_path / "run")


def test_corpus_shorter_than_a_sequence(megamem: Megamem, config_file: Path, tmp_path: Path, damaged: Path) -> None:
    output = train_on(megamem, config_file, damaged, tmp_path / "run", "train.sequence_length=100000000")
    assert "a sequence of 100000000 needs 100000001" in output


@pytest.mark.parametrize("layout", [(), ("parallel.tensor=2", "parallel.pipeline=2")], ids=["one rank", "four ranks"])
def test_token_id_past_the_vocabulary(
    megamem: Megamem, config_file: Path, tmp_path: Path, damaged: Path, layout: tuple[str, ...]
) -> None:
    put_token_id(damaged, "train", 300)
    output = train_on(megamem, config_file, damaged, tmp_path / "run", *layout)
    assert "token id 300, outside the vocabulary of 257" in output


def test_held_out_token_id_past_the_vocabulary(
    megamem: Megamem, config_file: Path, tmp_path: Path, damaged: Path
) -> None:
    put_token_id(damaged, "validation", 300)
    more = ("train.num_steps=3", "checkpoint.every_steps=0")
    assert "held-out document" in train_on(megamem, config_file, damaged, tmp_path / "run", *more)


def test_manifest_with_a_token_id_past_the_vocabulary(
    megamem: Megamem, config_file: Path, tmp_path: Path, damaged: Path
) -> None:
    manifest = json.loads((damaged / "manifest.json").read_text())
    manifest["splits"]["train"]["max_token_id"] = 300
    del manifest["digest"]
    (damaged / "manifest.json").write_text(json.dumps(manifest))
    assert "token id 300, past the vocabulary" in train_on(megamem, config_file, damaged, tmp_path / "run")


def test_a_defect_on_one_rank_is_the_last_thing_on_the_screen(
    megamem: Megamem, config_file: Path, tmp_path: Path
) -> None:
    """The others are in the middle of their steps, and end with it."""

    def break_rank_2() -> None:
        import torch.distributed as dist

        seed_step = pretrain.train.loop.seed_step

        def broken(seed: int, step: int) -> None:
            if step == 4 and dist.get_rank() == 2:
                raise ArithmeticError("injected")
            seed_step(seed, step)

        pretrain.train.loop.seed_step = broken

    layout = ("parallel.tensor=2", "parallel.pipeline=2")
    result = megamem("train", config_file, *layout, "--run-dir", tmp_path / "run", before=break_rank_2)
    assert result.code == 1
    assert "rank 2 failed with ArithmeticError: injected" in result.output
    assert "Traceback (most recent call last)" in result.output
    assert result.last_line == "ArithmeticError: injected"
