"""Names of files, tensors and keys reach a terminal as text on one line, whatever is in them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.checkpoint.index import read_index
from pretrain.checkpoint.store.safetensors_store import open_safetensors
from pretrain.checkpoint.store.state_dict import StateDictReader
from pretrain.errors import CheckpointError
from pretrain.printable import printable, printable_lines
from tools.cli import main as megamem
from tools.common.words import aligned, ending

# Clears the screen, names a line, and is half a surrogate pair: no encoding has it.
NAME = "a\x1b[2J\nmegamem: all is well\ud800"
SHOWN = "a\\x1b[2J\\nmegamem: all is well\\ud800"


@given(st.text(st.characters()))
def test_what_is_shown_is_printable_and_ordinary_names_stay(name: str) -> None:
    assert printable(name).isprintable()
    assert printable(name).encode().decode() == printable(name)
    assert not name.isprintable() or printable(name) == name
    assert printable_lines(name).count("\n") == name.count("\n")


def test_names_are_shown_on_one_line() -> None:
    assert printable(NAME) == SHOWN
    assert printable("n" * 100, 10) == "nnnnnnn..."
    assert list(aligned([["run", "b"], [NAME, "c"]]))[1] == f"{SHOWN}  c"
    assert ending(f"{NAME} is no run", 2) == "megamem: error: " + f"{SHOWN} is no run".replace("\\n", "\n")


def test_a_tensor_of_such_a_name_is_damage(tmp_path: Path) -> None:
    header = json.dumps({NAME: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    torch.save({NAME: torch.zeros(1)}, tmp_path / "model.bin")
    shown = SHOWN.replace("\\", r"\\").replace("[", r"\[")
    with pytest.raises(CheckpointError, match=f"names a tensor {shown}"):
        open_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="names a tensor a"):
        StateDictReader(tmp_path / "model.bin")


def test_an_index_with_such_a_name_is_damage(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as torch_checkpoint

    torch_checkpoint.save({NAME[:-1]: torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"can be trusted: it names something a\\x1b\[2J\\nmegamem"):
        read_index(tmp_path)


def test_half_a_surrogate_in_a_key_ends_neither_prepare_nor_inspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The last one is a byte that is not UTF-8.
    path = tmp_path / "a\x1b[2J\nb\udcff.jsonl"
    path.write_text('{"text": "one"}\n{"\\ud800\\u001b[2J": 1}\n{"text": "two"}\n')
    words = ["data", "prepare", str(path), "--output", str(tmp_path / "out"), "--max-bad", "1"]
    assert megamem([*words, "--validation-fraction", "0"]) == 0
    assert megamem(["data", "inspect", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert output.count(r"a\x1b[2J\nb\udcff.jsonl (1 file)") == 2
    assert output.count(r"(present: \ud800\x1b[2J)") == 2
    assert output.replace("\n", "").isprintable()


SAID_OF_PATHS = [
    ["data", "prepare", "FOLDER/none", "--output", "out"],
    ["data", "prepare", "FOLDER", "--output", "out"],
    ["data", "prepare", "FOLDER/texts", "--output", "out", "--tokenizer", "FOLDER/none"],
    ["data", "prepare", "FOLDER/texts", "FOLDER/texts", "--output", "out"],
    ["data", "inspect", "FOLDER/none"],
    ["train", "FOLDER/none.yaml"],
    ["train", "a.yaml", "--run-dir", "FOLDER/texts/a.txt"],
    ["config", "check", "a.yaml", "data.datasets=[{path: 'FOLDER'}]"],
    ["eval", "FOLDER"],
    ["plot", "FOLDER"],
    ["report", "FOLDER/none"],
    ["status", "FOLDER"],
    ["checkpoint", "convert", "FOLDER/none", "out"],
]


@pytest.mark.parametrize("words", SAID_OF_PATHS, ids=lambda words: " ".join(words[:3]))
def test_paths_of_a_command_are_shown_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """A folder whose name has a line break, with a file of such a name in it that no command names."""
    monkeypatch.chdir(tmp_path)
    folder = Path("two\nlines")
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "a.txt").write_text("text " * 50)
    (folder / "b\x1b[2J\nc.pdf").write_bytes(b"%PDF-1.7")
    Path("a.yaml").write_text("train: {num_steps: 2}\n")
    assert megamem([word.replace("FOLDER", str(folder)) for word in words]) in (2, 3, 4)
    said = capsys.readouterr().err
    assert said.startswith("megamem: error: ")
    assert said.count("\n") == 1, said
    assert said.rstrip("\n").isprintable()


def test_a_key_of_a_configuration_is_shown_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text('"a\\e[2J\\nb": 1\n')
    assert megamem(["config", "check", str(tmp_path / "a.yaml")]) == 2
    assert r"unknown key a\x1b[2J\nb" in capsys.readouterr().err
