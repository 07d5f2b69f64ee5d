"""Held-out windows: every token predicted once, bytes counted right, compressors equal to the command line tools."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pretrain.config.schema import DatasetEntry, EvaluationEntry
from pretrain.data.blend import domain_names
from pretrain.data.held_out import HeldOutDataset, compression_baselines, held_out_documents
from pretrain.data.manifest import open_dataset
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from pretrain.errors import DataError

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)


def make(folder: Path, texts: list[str], name: str = "data", tokenizer: Tokenizer | None = None) -> DatasetEntry:
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"num_workers": 1, "validation_fraction": 0.5}
    prepare([str(source)], folder / name, tokenizer or ByteTokenizer(), **options)
    return DatasetEntry(str(folder / name))


def stream_of(entries: list[DatasetEntry]) -> list[int]:
    stream: list[int] = []
    for entry in entries:
        documents = open_dataset(entry.path).open_split("validation")
        for index in range(len(documents)):
            stream += documents[index].tolist()
    return stream


@settings(max_examples=40, deadline=None)
@example(texts=["0", "\x85", "1"], sequence_length=1, num_entries=1)
@given(
    # Blank ones are no documents, and one alone may be too short to be cut.
    texts=st.lists(TEXT, min_size=2, max_size=8, unique=True).filter(
        lambda texts: sum(map(bool, map(str.strip, texts))) > 1
    ),
    sequence_length=st.integers(1, 40),
    num_entries=st.integers(1, 3),
)
def test_every_token_is_a_target_once_after_the_tokens_before_it(
    texts: list[str], sequence_length: int, num_entries: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("windows")
    entries = [make(folder, texts[i:] + texts[:i], f"data{i}") for i in range(num_entries)]
    stream = stream_of(entries)
    dataset = HeldOutDataset(entries, sequence_length)
    targets: list[int] = []
    inputs: list[int] = []
    for window in (dataset[i] for i in range(len(dataset))):
        assert all(value.shape == (sequence_length,) for value in window.values())
        counted = window["loss_mask"].bool()
        assert set(window["loss_mask"].tolist()) <= {0.0, 1.0}
        targets += window["labels"][counted].tolist()
        inputs += window["tokens"][counted].tolist()
        assert window["position_ids"].tolist() == list(range(sequence_length))
        assert int(window["tokens"].max()) <= 256
    assert targets == stream
    assert inputs == [256, *stream[:-1]]
    assert dataset.num_target_tokens == len(stream)
    assert dataset.num_bytes == sum(token != 256 for token in stream)


@settings(max_examples=20, deadline=None)
@given(sequence_length=st.integers(1, 30), max_sequences=st.integers(1, 30))
def test_part_of_the_windows_has_its_own_bytes(
    sequence_length: int, max_sequences: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("part")
    entries = [make(folder, ["one document", "another one", "and a third", "and more"] * 3)]
    stream = stream_of(entries)
    dataset = HeldOutDataset(entries, sequence_length, max_sequences)
    kept = stream[: sequence_length * max_sequences]
    assert len(dataset) == -(-len(kept) // sequence_length)
    assert dataset.num_target_tokens == len(kept)
    assert dataset.num_bytes == sum(token != 256 for token in kept)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_bytes_are_those_of_the_text_whatever_the_tokenizer(tmp_path: Path):
    texts = [f"für jeden Tag {i} ein Wort 漢字" for i in range(12)]
    bpe = train_bpe(texts, 300, tmp_path / "t.json")
    by_bytes, by_bpe = make(tmp_path, texts, "bytes"), make(tmp_path, texts, "bpe", bpe)
    assert list(held_out_documents([by_bytes])) == list(held_out_documents([by_bpe]))
    assert HeldOutDataset([by_bytes], 8).num_bytes == HeldOutDataset([by_bpe], 8).num_bytes
    assert HeldOutDataset([by_bpe], 8).num_target_tokens < HeldOutDataset([by_bytes], 8).num_target_tokens
    assert {document.decode() for document in held_out_documents([by_bpe])} <= set(texts)


def test_bytes_of_the_first_documents_are_those_of_their_texts(tmp_path: Path) -> None:
    """Letters are spread over several tokens."""
    texts = [f"漢字{i}ü" * 2 for i in range(20)]
    bpe = train_bpe(["ascii alone"], 257, tmp_path / "t.json")
    entry = make(tmp_path, texts, "data", bpe)
    stream, held_out = stream_of([entry]), list(held_out_documents([entry]))
    ends = [position + 1 for position, token in enumerate(stream) if token == bpe.eod]
    for num_documents, end in enumerate(ends[:-1], start=1):
        counted = HeldOutDataset([entry], 1, max_sequences=end).num_bytes
        assert counted == sum(len(document) for document in held_out[:num_documents])


def test_compressors_are_at_their_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The presets of xz differ in how far they look back, and agree on a small text."""
    made: list[dict[str, int]] = []
    original = lzma.LZMACompressor

    def make_compressor(**options: int) -> lzma.LZMACompressor:
        made.append(options)
        return original(**options)

    entry = make(tmp_path, ["one", "two"])
    monkeypatch.setattr("pretrain.data.held_out.lzma.LZMACompressor", make_compressor)
    compression_baselines([entry])
    assert made == [{"format": lzma.FORMAT_XZ, "preset": 9}]


def test_baselines_are_what_the_tools_reach(tmp_path: Path):
    entry = make(tmp_path, [f"def function_{i}(self):\n    return self.value_{i % 3}\n" * 4 for i in range(30)])
    text = b"".join(held_out_documents([entry]))
    assert compression_baselines([entry]) == {
        "gzip -9": pytest.approx(8 * len(gzip.compress(text, 9)) / len(text)),
        "xz -9": pytest.approx(8 * len(lzma.compress(text, preset=9)) / len(text)),
    }


def test_id_past_the_vocabulary_names_document_and_data_set(tmp_path: Path):
    entry = make(tmp_path, [f"{index:02}{'x' * 7}" for index in range(12)])
    path = Path(entry.path) / "validation.bin"
    tokens = np.fromfile(path, dtype=np.uint16)
    tokens[13] = 999
    tokens.tofile(path)
    dataset = HeldOutDataset([entry], 10)
    assert dataset[0]["tokens"].tolist()[3:] == [120] * 7
    with pytest.raises(DataError, match="data: held-out document 1 holds token id 999, outside the vocabulary of 257"):
        dataset[1]


@pytest.mark.parametrize("max_sequences", [None, 1, 3, 7])
def test_every_target_has_its_domain_and_every_domain_its_bytes(tmp_path: Path, max_sequences: int | None) -> None:
    """Windows run across data sets: the domain of a target is that of the document that it is read from."""
    texts = {"a": ["x" * 21, "y" * 9], "b": ["é" * 8, "z" * 5], "c": ["w" * 30, "v" * 3]}
    entries = [replace(make(tmp_path, texts[name], name), name="ab" if name in "ab" else None) for name in texts]
    dataset = HeldOutDataset(entries, 8, max_sequences)
    streams = {name: stream_of([entry]) for name, entry in zip(texts, entries, strict=True)}
    owners = [name for name, stream in streams.items() for _ in stream][: dataset.num_target_tokens]
    named = {"a": "ab", "b": "ab", "c": "c"}
    counts = {domain.name: domain.num_target_tokens for domain in dataset.domains}
    assert counts == dict(Counter(named[owner] for owner in owners))
    assert sum(domain.num_bytes for domain in dataset.domains) == dataset.num_bytes
    windows = [dataset[number] for number in range(len(dataset))]
    if len(dataset.domains) == 1:
        assert not any("domains" in window for window in windows)
        return
    found = [
        dataset.domains[int(number)].name
        for window in windows
        for number, counted in zip(window["domains"], window["loss_mask"], strict=True)
        if counted
    ]
    assert found == [named[owner] for owner in owners]
    if max_sequences is None:
        sizes = {
            name: sum(len(document) for document in held_out_documents([entry]))
            for name, entry in zip(texts, entries, strict=True)
        }
        assert {domain.name: domain.num_bytes for domain in dataset.domains} == {
            "ab": sizes["a"] + sizes["b"],
            "c": sizes["c"],
        }


def test_names_of_domains() -> None:
    entries = [
        DatasetEntry("data/web"),
        DatasetEntry("data/web", 2.0),
        EvaluationEntry("x/code"),
        EvaluationEntry("y/code"),
        DatasetEntry("z/books", name="prose"),
    ]
    assert domain_names(entries) == ["web", "web", "x/code", "y/code", "prose"]
    # A name that was given keeps others from taking it.
    assert domain_names([DatasetEntry("a/web"), DatasetEntry("b", name="web")]) == ["a/web", "web"]
    assert domain_names([DatasetEntry("/data/web/")]) == ["web"]


def test_a_set_that_is_there_for_evaluation_is_read_whole_if_nothing_is_held_out(tmp_path: Path) -> None:
    source = tmp_path / "all.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "three")))
    prepare([str(source)], tmp_path / "all", ByteTokenizer(), num_workers=1, validation_fraction=0)
    path = str(tmp_path / "all")
    assert HeldOutDataset([EvaluationEntry(path)], 4).num_target_tokens == len("one") + len("three") + 2
    assert b"".join(held_out_documents([EvaluationEntry(path)])) == b"onethree"
    assert len(HeldOutDataset([DatasetEntry(path)], 4)) == 0
    some = make(tmp_path, ["kept", "four"], "some")
    assert list(held_out_documents([EvaluationEntry(some.path)])) == list(held_out_documents([some]))
