"""`megamem data`: what a person types and reads."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.errors import DataError
from tools.data import add_parser

ROOT = Path(__file__).parents[3]


def megamem(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="megamem")
    add_parser(parser.add_subparsers(required=True))
    arguments = parser.parse_args([str(word) for word in words])
    return arguments.func(arguments)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": f"document {i} of twenty"}) + "\n" for i in range(20)))
    return path


@pytest.mark.parametrize("command", ["prepare", "tokenizer", "inspect"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        megamem("data", command, "--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"megamem data {command} " in shown.split("examples:")[1]


def test_from_a_corpus_to_a_data_set(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer, output = tmp_path / "t.json", tmp_path / "out"
    assert megamem("data", "tokenizer", source, "--field", "body", "--vocab-size", 270, "--output", tokenizer) == 0
    assert "documents end with <|endoftext|> (id 0)" in capsys.readouterr().out
    prepare = [
        "data",
        "prepare",
        source,
        "--field",
        "body",
        "--tokenizer",
        tokenizer,
        "--output",
        output,
        "--workers",
        1,
    ]
    assert megamem(*prepare) == 0
    shown = capsys.readouterr().out
    assert "Prepared" in shown
    assert "19 documents" in shown
    assert megamem(*prepare) == 0
    assert "already complete: nothing to do" in capsys.readouterr().out
    assert megamem("data", "inspect", output, "--verify", "--documents", 1, "--split", "validation") == 0
    shown = capsys.readouterr().out
    assert "Every byte is as it was written." in shown
    assert "of twenty" in shown
    assert megamem("data", "inspect", output, "--json") == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["num_documents"] == 19


def test_skipped_documents_are_reported(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]):
    source.write_text(source.read_text() + "{\n")
    options = ["--field", "body", "--max-bad", 1]
    assert megamem("data", "prepare", source, *options, "--output", tmp_path / "out", "--workers", 1) == 0
    assert "0 empty documents, 1 bad\n" in capsys.readouterr().out
    assert megamem("data", "tokenizer", source, *options, "--output", tmp_path / "t.json", "--vocab-size", 300) == 0
    shown = capsys.readouterr().out
    assert "Skipped 1 bad document:" in shown
    assert "line 21: not valid JSON" in shown


def test_existing_tokenizer_is_kept(tmp_path: Path, source: Path):
    output = tmp_path / "t.json"
    output.write_text("mine")
    with pytest.raises(DataError, match=r"t\.json exists.*--overwrite"):
        megamem("data", "tokenizer", source, "--field", "body", "--vocab-size", 270, "--output", output)
    assert output.read_text() == "mine"


def test_the_command_line_starts_without_torch():
    program = "import sys, tools.data, pretrain.data.prepare, pretrain.data.manifest; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
