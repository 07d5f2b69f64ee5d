"""`megamem data`: what a person types and reads."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.data.manifest import open_dataset
from pretrain.errors import DataError
from tests.unit.data.kinds_of_tokenizers import byte_level, word_piece
from tools.data.command import add_parser

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


@pytest.mark.parametrize("command", ["prepare", "tokenizer", "inspect", "verify"])
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


def test_html_is_text_for_who_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.html"
    page.write_text("<p>one</p>\n" * 9)
    tokenizer = ["data", "tokenizer", page, "--vocab-size", 257, "--output", tmp_path / "t.json"]
    prepare = ["data", "prepare", page, "--output", tmp_path / "out", "--workers", 1]
    for command in (tokenizer, prepare):
        with pytest.raises(DataError, match=r"page\.html: HTML, and not text: .*--text"):
            megamem(*command)
        with pytest.raises(DataError, match="--text takes files as they are, so --field has no effect"):
            megamem(*command, "--text", "--field", "body")
        assert megamem(*command, "--text") == 0
    assert megamem(*prepare, "--text") == 0
    assert "already complete" in capsys.readouterr().out


def test_existing_tokenizer_is_kept(tmp_path: Path, source: Path):
    output = tmp_path / "t.json"
    output.write_text("mine")
    with pytest.raises(DataError, match=r"t\.json exists.*--overwrite"):
        megamem("data", "tokenizer", source, "--field", "body", "--vocab-size", 270, "--output", output)
    assert output.read_text() == "mine"


def test_the_command_line_starts_without_torch():
    modules = "sys, tools.data.command, pretrain.data.prepare, pretrain.data.manifest"
    program = f"import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_every_byte_of_data_sets_is_read(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]):
    sets = [tmp_path / name for name in ("good", "bad", "other")]
    for output in sets:
        assert megamem("data", "prepare", source, "--field", "body", "--output", output, "--workers", 1) == 0
    for name, at in (("train.bin", 7), ("validation.idx", 40)):
        content = bytearray((sets[1] / name).read_bytes())
        content[at] ^= 1
        (sets[1] / name).write_bytes(content)
    capsys.readouterr()
    with pytest.raises(DataError, match=r"train\.bin, validation\.idx are not the files that were written") as caught:
        megamem("data", "verify", *sets)
    assert str(sets[1]) in str(caught.value)
    shown = capsys.readouterr().out
    assert f"{sets[0]}: every byte is as it was written." in shown
    assert f"{sets[2]}: every byte is as it was written." in shown
    assert megamem("data", "verify", sets[0]) == 0


def test_a_manifest_without_a_digest_is_read_and_told(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert megamem("data", "prepare", source, "--field", "body", "--output", output, "--workers", 1) == 0
    manifest = json.loads((output / "manifest.json").read_text())
    del manifest["digest"]
    (output / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert megamem("data", "verify", output) == 0
    assert "as it was written, but for manifest.json, which is from a version that wrote no digest" in (
        capsys.readouterr().out
    )
    assert megamem("data", "inspect", output, "--json") == 0
    assert json.loads(capsys.readouterr().out) == manifest


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "train.idx is not an index of Megatron's"),
        (9, b"\x02", "train.idx has version 2 and ids of type 8, which this program does not write"),
        (17, b"\x01", "train.idx has version 1 and ids of type 1, which this program does not write"),
        (17, b"\x04", "train.idx says ids of 4 bytes, with which"),
        (18, b"\x14", "train.idx lists 20 documents where the manifest has 19"),
        (26, b"\x13", "train.idx lists 19 documents where the manifest has 19"),
    ],
)
def test_headers_are_looked_at_whenever_a_data_set_is_opened(
    tmp_path: Path, source: Path, at: int, value: bytes, message: str
) -> None:
    """Magic, version, type of the ids, sequences, and bounds of documents, which are one more."""
    output = tmp_path / "out"
    megamem("data", "prepare", source, "--field", "body", "--output", output, "--workers", 1)
    index = output / "train.idx"
    content = bytearray(index.read_bytes())
    content[at : at + 1] = value
    index.write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_dataset(output)


def test_a_tokenizer_that_loses_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "The Memory reads a few rows."}) + "\n")
    for make in (word_piece, byte_level):
        definition = tmp_path / f"{make.__name__}.json"
        definition.write_text(make().to_str())
        words = [
            "--tokenizer",
            definition,
            "--output",
            tmp_path / make.__name__,
            "--validation-fraction",
            0,
            "--workers",
            1,
        ]
        assert megamem("data", "prepare", source, *words) == 0
        told = capsys.readouterr().err
        # T and M of 28 characters.
        lost = "7.1% of the characters of the first documents do not come back from the tokenizer's ids: 'The' comes back as 'the'"
        assert (lost in told) is (make is word_piece), told


def test_looking_at_data_costs_no_import_of_torch(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out"
    prepare = ["data", "prepare", source, "--field", "body", "--output", output, "--workers", 1]
    assert megamem(*prepare, "--validation-fraction", 0) == 0
    program = (
        "import sys\nfrom tools import cli\n"
        f"assert cli.main(['data', 'inspect', {str(output)!r}, '--verify', '--documents', '30']) == 0\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    documents = [line for line in shown.stdout.splitlines() if line.startswith("document ")]
    assert documents == [f"document {number} of twenty" for number in range(20)]


def test_an_index_that_lists_other_documents_is_damage(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    prepare = ["data", "prepare", source, "--field", "body", "--output", output, "--workers", 1]
    assert megamem(*prepare, "--validation-fraction", 0) == 0
    index = output / "train.idx"
    content = bytearray(index.read_bytes())
    content[34:38] = (2**30).to_bytes(4, "little")
    index.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.idx cannot be used \(it lists 1073741824 ids in 1 documents"):
        megamem("data", "inspect", output, "--documents", 1)
