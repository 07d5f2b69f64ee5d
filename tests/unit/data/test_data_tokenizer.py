"""Byte and BPE tokenizers: round trips, identity, and definitions that cannot be used."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer, train_bpe
from pretrain.errors import DataError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
CORPUS = ["def run(self):\n    return self.value\n", "für jeden Tag ein Wort, für jeden Satz ein Punkt. " * 5] * 3


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return train_bpe(CORPUS, 300, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


def edited(tokenizer: HuggingFaceTokenizer, **changes) -> str:
    return json.dumps(json.loads(tokenizer.definition) | changes)


@given(text=TEXT)
def test_bytes_round_trip(text: str):
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize(text)
    assert ids == list(text.encode())
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.decode_bytes([*ids, tokenizer.eod]) == text.encode()


@given(text=TEXT)
def test_bpe_round_trip(bpe: HuggingFaceTokenizer, text: str):
    ids = bpe.tokenize(text)
    assert bpe.detokenize([*ids, bpe.eod]) == text
    assert bpe.decode_bytes(ids) == text.encode()
    assert all(0 <= token < bpe.vocab_size for token in ids)


def test_byte_tokenizer_is_257_ids():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, -1)
    assert tokenizer.token_dtype is np.uint16
    json.dumps(tokenizer.unique_identifiers)


def test_text_of_a_special_token_is_text(bpe: HuggingFaceTokenizer):
    ids = bpe.tokenize("a<|endoftext|>b")
    assert bpe.eod not in ids
    assert bpe.detokenize(ids) == "a<|endoftext|>b"


def test_truncation_padding_and_added_tokens_of_the_file_do_not_apply(bpe: HuggingFaceTokenizer):
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    tokenizer = HuggingFaceTokenizer(edited(bpe, post_processor=template, truncation=truncation, padding=padding))
    assert tokenizer.tokenize("a long enough text") == bpe.tokenize("a long enough text")


def test_special_tokens_but_the_end_of_a_document_are_shown(bpe: HuggingFaceTokenizer):
    """A model may generate them, and their bytes count."""
    definition = json.loads(bpe.definition)
    special = {**definition["added_tokens"][0], "id": bpe.vocab_size, "content": "<|other|>"}
    tokenizer = HuggingFaceTokenizer(edited(bpe, added_tokens=[*definition["added_tokens"], special]))
    assert tokenizer.vocab_size == bpe.vocab_size + 1
    assert tokenizer.decode_bytes([*bpe.tokenize("a"), bpe.vocab_size, tokenizer.eod]) == b"a<|other|>"


def test_training_is_deterministic_and_complete(bpe: HuggingFaceTokenizer, tmp_path: Path):
    again = train_bpe(iter(CORPUS), 300, tmp_path / "t.json")
    assert again.fingerprint == bpe.fingerprint
    assert bpe.vocab_size == 300
    assert bpe.eod_token == "<|endoftext|>"
    assert load_tokenizer(tmp_path / "t.json").fingerprint == bpe.fingerprint
    assert load_tokenizer(str(tmp_path / "t.json")).tokenize("für") == bpe.tokenize("für")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_vocabulary_too_small_for_the_bytes(tmp_path: Path):
    with pytest.raises(DataError, match=r"vocabulary of 256 cannot hold the 256 bytes.*257 or more"):
        train_bpe(CORPUS, 256, tmp_path / "t.json")


def test_errors_of_the_documents_come_through_training(tmp_path: Path):
    def documents() -> Iterator[str]:
        yield "x"
        raise DataError("a.jsonl, line 2: broken")

    with pytest.raises(DataError, match="line 2: broken"):
        train_bpe(documents(), 300, tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_end_of_document_token_is_found_named_or_refused(bpe: HuggingFaceTokenizer):
    renamed = bpe.definition.replace("<|endoftext|>", "<my-end>")
    with pytest.raises(DataError, match=r"no token that ends a document.*--eod-token"):
        HuggingFaceTokenizer(renamed)
    assert HuggingFaceTokenizer(renamed, "<my-end>").eod == bpe.eod
    with pytest.raises(DataError, match="no token '<other>'"):
        HuggingFaceTokenizer(renamed, "<other>")
    assert HuggingFaceTokenizer(renamed.replace("<my-end>", "</s>")).eod_token == "</s>"


def test_fingerprint_follows_the_meaning_and_not_the_layout(bpe: HuggingFaceTokenizer):
    compact = json.dumps(json.loads(bpe.definition), separators=(",", ":"))
    assert HuggingFaceTokenizer(compact).fingerprint == bpe.fingerprint
    assert HuggingFaceTokenizer(bpe.definition, "a").fingerprint != bpe.fingerprint
    assert ByteTokenizer().fingerprint == ByteTokenizer().fingerprint != bpe.fingerprint


def test_tokenizers_travel_to_other_processes(bpe: HuggingFaceTokenizer):
    for tokenizer in (bpe, ByteTokenizer()):
        copy: Tokenizer = pickle.loads(pickle.dumps(tokenizer))
        assert copy.fingerprint == tokenizer.fingerprint
        assert copy.tokenize("für") == tokenizer.tokenize("für")


def test_tokenizer_that_is_not_there_or_not_one(tmp_path: Path):
    with pytest.raises(DataError, match="no such tokenizer"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"tokenizer\.json: not a usable tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\x00")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="byte tokenizer has its own"):
        load_tokenizer("bytes", "</s>")


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(DataError, match="Token id 257 is outside the vocabulary of 257"):
        ByteTokenizer().detokenize([1, 257])
    with pytest.raises(DataError, match="Token id -1 "):
        ByteTokenizer().detokenize([-1])
