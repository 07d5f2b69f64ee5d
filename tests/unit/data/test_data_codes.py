"""Images as codes: the quantiser, the arrays that are prepared, and the tokenizer whose words they are."""

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
from pretrain.data.quantise import k_means, nearest, patches, quantise_file
from pretrain.data.sources import read_records
from pretrain.data.tokenizer import CodeTokenizer, load_tokenizer
from pretrain.errors import DataError


def test_patches_are_cut_row_by_row() -> None:
    pixels = np.arange(2 * 4 * 6 * 2, dtype=np.float64).reshape(2, 4, 6, 2)
    cut = patches(pixels, 2)
    assert cut.shape == (2, 6, 8)
    for image, row, column in np.ndindex(2, 2, 3):
        expected = pixels[image, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].ravel()
        assert np.array_equal(cut[image, 3 * row + column], expected)
    with pytest.raises(DataError, match="--patch 4 does not divide images of 4 x 6 pixels"):
        patches(pixels, 4)


def test_k_means_end_where_no_vector_and_no_mean_moves() -> None:
    """Each mean is that of the vectors nearest to it, found here one by one; and clusters that are apart are found."""
    generator = np.random.default_rng(1)
    centres = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [30.0, 30.0]])
    vectors = np.concatenate([centre + generator.normal(size=(25, 2)) for centre in centres])
    means = k_means(vectors, 4)
    of = [int(np.argmin([np.sum((vector - mean) ** 2) for mean in means])) for vector in vectors]
    assert nearest(vectors, means).tolist() == of
    for number, mean in enumerate(means):
        assert np.allclose(mean, np.mean([v for v, at in zip(vectors, of, strict=True) if at == number], 0), atol=1e-12)
    assert len({tuple(of[start : start + 25]) for start in range(0, 100, 25)}) == 4
    assert np.array_equal(k_means(vectors, 4), means)


def test_as_many_means_as_vectors_are_the_vectors() -> None:
    vectors = np.array([[3.0], [1.0], [1.0], [2.0]])
    assert sorted(k_means(vectors, 3)[:, 0]) == [1.0, 2.0, 3.0]
    with pytest.raises(DataError, match="--codes 4: the images have 3 kinds of patches"):
        k_means(vectors, 4)


def test_a_mean_that_loses_all_its_vectors_starts_again() -> None:
    vectors = np.array([[0.0], [0.1], [0.2], [50.0], [51.0], [100.0]])
    means = k_means(np.repeat(vectors, [9, 9, 9, 1, 1, 1], 0), 4)
    assert len(np.unique(nearest(vectors, means))) == 4


def images(folder: Path) -> Path:
    """Twelve pictures of three kinds of bars, with their kinds as classes."""
    pixels = np.zeros((12, 4, 4))
    for number in range(12):
        pixels[number, number % 3] = 1 + number % 2
    np.savez(folder / "images.npz", images=pixels, classes=np.arange(12) % 3)
    return folder / "images.npz"


def test_images_become_documents_of_their_class_and_codes(tmp_path: Path) -> None:
    codes = quantise_file(images(tmp_path), tmp_path / "codes.npz", patch=2, num_codes=5)
    assert codes.shape == (12, 4)
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


def test_files_that_are_no_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no arrays")
    np.savez(tmp_path / "flat.npz", images=np.zeros((3, 4)), classes=np.zeros(3, int))
    for name, message in (("text", "cannot be read"), ("flat", r"images is \[3, 4\]"), ("none", "cannot be read")):
        with pytest.raises(DataError, match=message):
            quantise_file(tmp_path / f"{name}.npz", tmp_path / "codes.npz", patch=2, num_codes=2)


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
