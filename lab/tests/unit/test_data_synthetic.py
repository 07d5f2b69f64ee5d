"""`megamem data synthetic`: what a person types and reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.commands import COMMANDS, STUDIES
from pretrain.data.manifest import open_dataset
from pretrain.errors import ConfigError, DataError
from tools.cli import build_parser


def megamem(*words: object) -> int:
    arguments = build_parser(COMMANDS, STUDIES).parse_args([str(word) for word in words])
    return arguments.func(arguments)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": f"document {i} of twenty"}) + "\n" for i in range(20)))
    return path


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        megamem("data", "synthetic", "--help")
    assert caught.value.code == 0
    assert "megamem data synthetic " in capsys.readouterr().out.split("examples:")[1]


def test_documents_that_reward_looking_back(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]):
    filling, output = tmp_path / "filling", tmp_path / "synthetic"
    megamem("data", "prepare", source, "--field", "body", "--output", filling, "--workers", 1)
    synthetic = ("data", "synthetic", filling, "--output", output, "--lengths", "300,500", "--documents", 24)
    assert megamem(*synthetic) == 0
    assert "24 documents of needle, kv, hops, rounds, mapping" in capsys.readouterr().out
    dataset = open_dataset(output)
    assert dataset.tokenizer.fingerprint == open_dataset(filling).tokenizer.fingerprint
    documents = dataset.open_split("train")
    sizes = [len(ids) for ids in documents]
    assert all(min(abs(size - 300), abs(size - 500)) < 30 for size in sizes)
    assert all("assert " in dataset.tokenizer.detokenize(ids) for ids in documents)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    again = tmp_path / "again"
    assert megamem("data", "synthetic", filling, "--output", again, "--lengths", "300,500", "--documents", 24) == 0
    assert (again / "train.bin").read_bytes() == (output / "train.bin").read_bytes()
    with pytest.raises(DataError, match="Choose another --output, or pass --overwrite"):
        megamem(*synthetic)
    assert megamem(*synthetic[:-1], 30, "--overwrite") == 0
    with pytest.raises(ConfigError, match="no task 'needel'"):
        megamem(*synthetic, "--tasks", "needel")
    with pytest.raises(ConfigError, match="--lengths is 3,a"):
        megamem("data", "synthetic", filling, "--output", tmp_path / "x", "--lengths", "3,a")
    with pytest.raises(ConfigError, match=r"needs \d+ tokens"):
        megamem("data", "synthetic", filling, "--output", tmp_path / "x", "--lengths", "30")
