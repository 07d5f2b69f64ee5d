"""The edge of the vocabulary: its last id passes every reader, and the first one past it none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megamem.config.model import ModelConfig
from pretrain.config.schema import DatasetEntry
from pretrain.data.blend import model_vocab_size
from pretrain.data.dataset import build_train_dataset
from pretrain.data.held_out import HeldOutDataset
from pretrain.data.manifest import MANIFEST_FILE, SPLITS, open_dataset
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.errors import ConfigError, DataError

SIZE = ByteTokenizer().vocab_size
INSIDE, OUTSIDE = (0, SIZE - 1), (SIZE, SIZE + 1, -1)


class Wide(ByteTokenizer):
    """Ids of four bytes with a sign, as large vocabularies have them."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = 70_000


def make(folder: Path, name: str = "data") -> DatasetEntry:
    """Eight documents of nine letters and their end, half of them held out; stored as the ids of a large vocabulary."""
    source = folder / f"{name}.jsonl"
    source.write_text((json.dumps({"text": "x" * 9}) + "\n") * 8)
    prepare([str(source)], folder / name, Wide(), validation_fraction=0.5, num_workers=1)
    return DatasetEntry(str(folder / name))


def put(entry: DatasetEntry, split: str, token_id: int) -> None:
    """Other ids in place of letters of the first document: the smallest of all, which is a good one, and behind it
    `token_id`.
    """
    path = Path(entry.path) / f"{split}.bin"
    ids = np.fromfile(path, dtype=np.int32)
    ids[1], ids[3] = 0, token_id
    ids.tofile(path)


@pytest.mark.parametrize("token_id", [*INSIDE, *OUTSIDE])
def test_training_and_held_out_documents(tmp_path: Path, token_id: int) -> None:
    entry = make(tmp_path)
    for split in SPLITS:
        put(entry, split, token_id)
    num_tokens = open_dataset(entry.path).manifest.splits["train"].num_tokens
    train = build_train_dataset(
        [entry],
        sequence_length=num_tokens - 1,
        num_samples=1,
        seed=1,
        tokenizer=ByteTokenizer(),
        cache_dir=tmp_path / "cache",
    )
    held_out = HeldOutDataset([entry], 10)
    if token_id in INSIDE:
        assert token_id in train[0]["tokens"].tolist()
        assert held_out[0]["labels"][3] == token_id
    else:
        for samples in (train, held_out):
            with pytest.raises(
                DataError, match=rf"document 0 holds token id {token_id}, outside the vocabulary of {SIZE}\."
            ):
                samples[0]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("token_id", [SIZE - 1, SIZE, SIZE + 1])
def test_the_manifest(tmp_path: Path, split: str, token_id: int) -> None:
    entry = make(tmp_path)
    path = Path(entry.path) / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["tokenizer"]["vocab_size"] = SIZE
    manifest["splits"][split]["max_token_id"] = token_id
    # As of a writer who was wrong.
    del manifest["digest"]
    path.write_text(json.dumps(manifest))
    if token_id < SIZE:
        open_dataset(entry.path)
    else:
        with pytest.raises(DataError, match=rf"{split} holds token id {token_id}, past the vocabulary of {SIZE}\."):
            open_dataset(entry.path)


def test_the_manifest_has_the_largest_id_of_each_split(tmp_path: Path) -> None:
    """The largest id is the end of documents here, and for a tokenizer whose first id that is, the largest letter."""

    class EndFirst(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.eod = 0

    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": letter * 3}) + "\n" for letter in "abcdefgh"))
    prepare([str(source)], tmp_path / "out", EndFirst(), validation_fraction=0.5, num_workers=1)
    dataset = open_dataset(tmp_path / "out")
    for split in SPLITS:
        documents = dataset.open_split(split)
        largest = max(int(documents[i].max()) for i in range(len(documents)))
        assert ord("a") <= largest <= ord("h")
        assert dataset.manifest.splits[split].max_token_id == largest


@pytest.mark.parametrize("claimed", [SIZE - 1, SIZE, SIZE + 1])
def test_preparation(tmp_path: Path, claimed: int) -> None:
    """A tokenizer that gives ids past its own vocabulary is refused."""
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = claimed
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "one"}\n{"text": "two"}\n')
    options = {"validation_fraction": 0.5, "num_workers": 1}
    if claimed < SIZE:
        with pytest.raises(DataError, match=rf"gave id {SIZE - 1}, past its own vocabulary of {claimed}\."):
            prepare([str(source)], tmp_path / "out", tokenizer, **options)  # type: ignore[arg-type]
    else:
        prepare([str(source)], tmp_path / "out", tokenizer, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("token_id", [*INSIDE, *OUTSIDE])
def test_decoding(token_id: int) -> None:
    if token_id in INSIDE:
        assert ByteTokenizer().decode_bytes([65, token_id, 66]) == (b"A\0B" if token_id == 0 else b"AB")
    else:
        with pytest.raises(DataError, match=f"Token id {token_id} is outside the vocabulary of {SIZE}"):
            ByteTokenizer().decode_bytes([65, token_id, 66])


@pytest.mark.parametrize(("size", "dtype"), [(65_534, np.uint16), (65_535, np.uint16), (65_536, np.int32)])
def test_the_narrowest_type_that_holds_all_ids(size: int, dtype: type) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = size
    assert tokenizer.token_dtype is dtype


@pytest.mark.parametrize(
    ("model_size", "expected"), [(None, SIZE), (SIZE, SIZE), (SIZE + 1, SIZE + 1), (SIZE - 1, None)]
)
def test_the_embedding_has_all_ids(model_size: int | None, expected: int | None) -> None:
    model = ModelConfig(vocab_size=model_size)
    if expected is not None:
        assert model_vocab_size(model, ByteTokenizer()) == expected
    else:
        with pytest.raises(ConfigError, match=rf"model\.vocab_size is {model_size}, but .* has {SIZE} ids"):
            model_vocab_size(model, ByteTokenizer())
