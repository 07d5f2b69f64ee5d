"""Images as codes: the arrays that are prepared, and the tokenizer whose words they are."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.data import sources
from pretrain.data.files import list_files
from pretrain.data.manifest import open_dataset
from pretrain.data.prepare import prepare
from pretrain.data.sources import read_records
from pretrain.data.tokenizer import CodeTokenizer, load_tokenizer
from pretrain.errors import DataError


def test_images_become_documents_of_their_class_and_codes(tmp_path: Path) -> None:
    codes = np.random.default_rng(1).integers(0, 5, (12, 4))
    np.savez(tmp_path / "codes.npz", codes=codes, classes=np.arange(12) % 3)
    tokenizer = load_tokenizer("codes:5,3")
    prepared = prepare(
        [str(tmp_path / "codes.npz")], tmp_path / "data", tokenizer, validation_fraction=0.3, num_workers=1
    ).dataset
    found = [ids.tolist() for split in ("train", "validation") for ids in open_dataset(prepared.path).open_split(split)]
    # Five codes, the end, and three classes.
    expected = [[6 + number % 3, *codes[number].tolist(), 5] for number in range(12)]
    assert sorted(found) == sorted(expected)
    assert open_dataset(prepared.path).tokenizer.fingerprint == tokenizer.fingerprint


def test_words_become_ids_and_ids_words() -> None:
    tokenizer = CodeTokenizer(16, 3)
    assert (tokenizer.eod, tokenizer.vocab_size) == (16, 20)
    assert tokenizer.tokenize("c2 0 15\nc0") == [19, 0, 15, 17]
    assert tokenizer.detokenize([19, 0, 15, 17, 16]) == "c2 0 15 c0 "
    assert CodeTokenizer(16, 3).fingerprint == tokenizer.fingerprint != CodeTokenizer(16, 4).fingerprint


@pytest.mark.parametrize("word", ["16", "c3", "-1", "c", "x", "1.5"])
def test_words_that_are_none_are_refused(word: str) -> None:
    with pytest.raises(DataError, match=re.escape(repr(word)) + " is neither one of 16 codes"):
        CodeTokenizer(16, 3).tokenize(f"0 {word}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("codes:16", "codes:16: no such tokenizer. Give codes:NUM_CODES,NUM_CLASSES"),
        ("codes:a,3", "codes:a,3: no such tokenizer"),
        ("codes:0,3", "codes:0,3: give 1 code or more"),
    ],
)
def test_specs_that_are_none_are_refused(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        load_tokenizer(spec)
    with pytest.raises(DataError, match="code tokenizer has its own end-of-document token"):
        load_tokenizer("codes:16,3", "</s>")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"codes": np.zeros((2, 3), int)}, "no array 'classes', only codes"),
        ({"codes": np.zeros((2, 3)), "classes": np.zeros(2, int)}, "'codes' does not hold whole numbers"),
        ({"codes": np.full((2, 3), -1), "classes": np.zeros(2, int)}, "'codes' does not hold whole numbers from 0"),
        ({"codes": np.zeros((2, 3), int), "classes": np.zeros(3, int)}, r"classes is \[3\] and codes \[2, 3\], not"),
    ],
)
def test_arrays_that_are_no_codes_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        prepare([str(tmp_path / "a.npz")], tmp_path / "data", CodeTokenizer(8, 2), num_workers=1)


def test_codes_are_read_row_by_row_and_arrays_have_a_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "codes.npz"
    np.savez_compressed(path, codes=np.zeros((4_000, 256), np.uint8), classes=np.zeros(4_000, np.uint8))
    (file,) = list_files([str(path)])
    tracemalloc.start()
    assert sum(1 for _ in read_records([file], "text")) == 4_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # As a list of Python's numbers, they take eight bytes each.
    assert peak < 4_000 * 256 * 3
    monkeypatch.setattr(sources, "_MAX_ARRAY_BYTES", 1 << 19)
    (record,) = read_records([file], "text")
    assert record.failure is not None
    assert "unpacked it has" in record.failure
