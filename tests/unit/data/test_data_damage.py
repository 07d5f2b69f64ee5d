"""Damage to a prepared data set: found when it is opened, or when it is verified."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from prepared_sets import corpus, run

from pretrain.data.manifest import Manifest, open_dataset
from pretrain.data.tokenizer import train_bpe
from pretrain.errors import DataError


def every_flip(content: str) -> Iterator[str]:
    """The text with one bit of one character flipped, for every third character and every bit."""
    for place, bit in product(range(0, len(content), 3), range(7)):
        yield f"{content[:place]}{chr(ord(content[place]) ^ 1 << bit)}{content[place + 1 :]}"


def test_a_flip_in_the_manifest_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """White space means nothing; whatever else is read differently is refused."""
    dataset = run(corpus(tmp_path / "a.jsonl", 4), tmp_path / "out").dataset
    content = dataset.manifest.to_json()
    num_found = 0
    for changed in every_flip(content):
        try:
            assert Manifest.from_json(changed) == dataset.manifest
        except (ValueError, KeyError, TypeError):
            num_found += 1
    assert num_found > len(content)
    (tmp_path / "out" / "manifest.json").write_text(content.replace('"python": "3.', '"python": "9.'))
    with pytest.raises(
        DataError, match=r"damaged: manifest\.json cannot be used \(its contents are not those that were"
    ):
        open_dataset(tmp_path / "out")


DAMAGE = {
    "train.bin": "train.bin has .* bytes where",
    "train.idx": "train.idx has .* bytes where",
    "validation.bin": "validation.bin has .* bytes where",
    "manifest.json": "manifest.json cannot be used",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_truncated_and_missing_files_are_found_on_opening(tmp_path: Path, name: str):
    run(corpus(tmp_path / "a.jsonl"), tmp_path / "out")
    path = tmp_path / "out" / name
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=rf"data set is damaged: {DAMAGE[name]}"):
        open_dataset(tmp_path / "out")
    path.unlink()
    with pytest.raises(DataError, match="is missing" if name != "manifest.json" else "not a prepared data set"):
        open_dataset(tmp_path / "out")


def test_changed_bytes_are_found_by_verification(tmp_path: Path):
    run(corpus(tmp_path / "a.jsonl"), tmp_path / "out")
    path = tmp_path / "out" / "validation.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(DataError, match=r"validation\.bin is not the file that was written"):
        open_dataset(tmp_path / "out").verify()


@pytest.mark.parametrize(
    "name", [f"{split}.{suffix}" for split in ("train", "validation") for suffix in ("bin", "idx")]
)
def test_every_file_is_verified(tmp_path: Path, name: str) -> None:
    dataset = run(corpus(tmp_path / "a.jsonl"), tmp_path / "out").dataset
    dataset.verify()
    path = tmp_path / "out" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=rf"{name} is not the file that was written"):
        dataset.verify()


def test_an_index_of_as_many_documents_of_other_lengths_is_damage(tmp_path: Path) -> None:
    folders = []
    for name, word in (("a", "word"), ("b", "words")):
        source = tmp_path / f"{name}.jsonl"
        source.write_text((json.dumps({"text": word}) + "\n") * 9)
        folders.append(run(source, tmp_path / name).dataset.path)
    shutil.copy(folders[1] / "train.idx", folders[0] / "train.idx")
    with pytest.raises(DataError, match="damaged"):
        open_dataset(folders[0]).open_split("train")


def test_index_without_its_header_is_damage(tmp_path: Path):
    dataset = run(corpus(tmp_path / "a.jsonl"), tmp_path / "out").dataset
    path = tmp_path / "out" / "train.idx"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(DataError, match=r"train\.idx is not an index"):
        dataset.open_split("train")


def test_tokenizer_of_another_set_is_refused(tmp_path: Path):
    source = corpus(tmp_path / "a.jsonl")
    one = train_bpe(["one text"], 260, tmp_path / "1.json")
    train_bpe(["another text"], 261, tmp_path / "2.json")
    run(source, tmp_path / "out", tokenizer=one)
    shutil.copy(tmp_path / "2.json", tmp_path / "out" / "tokenizer.json")
    with pytest.raises(DataError, match="its tokenizer is not the one that made the tokens"):
        open_dataset(tmp_path / "out")


def test_missing_data_set(tmp_path: Path):
    with pytest.raises(DataError, match=r"no such data set.*megamem data prepare"):
        open_dataset(tmp_path / "none")
    with pytest.raises(DataError, match="not a prepared data set"):
        open_dataset(tmp_path)
