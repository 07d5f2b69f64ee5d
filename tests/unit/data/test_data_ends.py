"""The token that ends documents, special tokens in texts, and what an export makes of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from pretrain.convert.huggingface.tokenizer_check import tokenizer_difference
from pretrain.convert.huggingface.tokenizer_files import read_tokenizer, write_tokenizer
from pretrain.data.manifest import PreparedDataset
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import DataError
from tests.unit.data.kinds_of_tokenizers import END, MARKERS, THINK, byte_level, kinds

CHAT = f"{MARKERS[0]}user\nthe memory{MARKERS[1]}\n{THINK}the model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A chat model's tokenizer, whose folder names another end than the first that is known."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    backend = byte_level()
    backend.add_special_tokens([AddedToken("</s>", normalized=False)])
    (folder / "tokenizer.json").write_text(backend.to_str())
    return folder


def prepared(folder: Path, texts: list[str], *, max_bad: int = 0, **options: Any) -> PreparedDataset:
    lines = folder.parent / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = load_tokenizer(folder, **options)
    return prepare(
        [str(lines)], folder.parent / "data", tokenizer, num_workers=1, validation_fraction=0, max_bad=max_bad
    ).dataset


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"eos_token": MARKERS[1]}),
        ("tokenizer_config.json", {"eos_token": {"content": MARKERS[1]}}),
        ("config.json", {"eos_token_id": None}),
        ("config.json", {"eos_token_id": [None, 0]}),
        ("info.json", {"eod_token": MARKERS[1]}),
        ("manifest.json", {"tokenizer": {"eod_token": MARKERS[1]}}),
    ],
)
def test_the_folder_says_which_token_ends_documents(folder: Path, file: str, content: dict[str, Any]) -> None:
    if "eos_token_id" in content:
        number = byte_level().token_to_id(MARKERS[1])
        content = {"eos_token_id": number if content["eos_token_id"] is None else [number, 0]}
    (folder / file).write_text(json.dumps(content))
    assert load_tokenizer(folder).eod_token == MARKERS[1]
    assert load_tokenizer(folder / "tokenizer.json").eod_token == MARKERS[1]
    assert load_tokenizer(folder, END).eod_token == END


def test_an_end_is_not_guessed_from_several(folder: Path) -> None:
    with pytest.raises(DataError, match=r"<\|endoftext\|> and </s> may each end a document.*--eod-token"):
        load_tokenizer(folder)


@pytest.mark.parametrize("end", [THINK, "e"])
def test_there_are_as_many_ends_as_documents(folder: Path, end: str) -> None:
    """An added token that is not special, and an ordinary piece, are found in texts."""
    texts = ["the row", "a row", "f{end} at"]
    with pytest.raises(DataError, match=r"line 3: .*ends documents.*--eod-token"):
        prepared(folder, [text.format(end=end) for text in ["a row", "to it", "of {end} it"]], eod_token=end)
    data = prepared(
        folder, ["a row", "to it", f"of {end} it", *(texts[:1] if end == THINK else [])], max_bad=1, eod_token=end
    )
    ids = data.open_split("train")
    assert sum(int((ids[number] == data.tokenizer.eod).sum()) for number in range(len(ids))) == len(ids)
    assert data.manifest.num_skipped == 1


def test_markers_are_text_unless_they_are_asked_for(folder: Path) -> None:
    plain, special = load_tokenizer(folder, END), load_tokenizer(folder, END, special_tokens=True)
    markers = [byte_level().token_to_id(token) for token in MARKERS]
    assert not set(markers) & set(plain.tokenize(CHAT))
    assert [id for id in special.tokenize(CHAT) if id in markers] == markers
    assert plain.detokenize(plain.tokenize(CHAT)) == special.detokenize(special.tokenize(CHAT)) == CHAT
    # Both name the same rows, and may be trained on together.
    assert plain.fingerprint == special.fingerprint
    data = prepared(folder, [CHAT], eod_token=END, special_tokens=True)
    assert data.tokenizer.tokenize(CHAT) == special.tokenize(CHAT)
    documents = data.open_split("train")
    assert documents[0].tolist() == [*special.tokenize(CHAT), special.eod]


@pytest.mark.parametrize("special_tokens", [False, True])
def test_an_exported_tokenizer_reads_markers_as_training_did(
    folder: Path, tmp_path: Path, special_tokens: bool
) -> None:
    tokenizer = load_tokenizer(folder, END, special_tokens=special_tokens)
    out = written(tokenizer, tmp_path)
    read = AutoTokenizer.from_pretrained(out)
    ids = tokenizer.tokenize(CHAT)
    assert read.encode(CHAT, add_special_tokens=False) == ids
    assert read.decode(ids) == CHAT
    assert tokenizer_difference(out, tokenizer) is None
    # A request begins a document with its end, whatever else is text.
    assert read.encode(f"{END}{CHAT}", add_special_tokens=False) == [tokenizer.eod, *ids]
    assert [read.convert_tokens_to_ids(token) for token in MARKERS] == [
        byte_level().token_to_id(token) for token in MARKERS
    ]
    again = read_tokenizer(out)
    assert again.tokenize(CHAT) == tokenizer.tokenize(CHAT)
    assert (again.eod_token, again.special_tokens) == (END, special_tokens)


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_of_tokenizer_is_exported_as_it_is(tmp_path: Path, kind: str) -> None:
    tokenizer = kinds()[kind]
    assert tokenizer_difference(written(tokenizer, tmp_path), tokenizer) is None


def test_a_class_that_transformers_puts_over_a_tokenizer_is_told(tmp_path: Path) -> None:
    tokenizer = kinds()["word_piece"]
    out = written(tokenizer, tmp_path, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    told = tokenizer_difference(out, tokenizer)
    assert told is not None
    assert "Qwen2Tokenizer" in told
    assert "'The memory reads" in told


def written(tokenizer: Tokenizer, folder: Path, config: dict[str, Any] | None = None) -> Path:
    out = folder / "exported"
    out.mkdir()
    write_tokenizer(tokenizer, out, sequence_length=32)
    (out / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    return out
