"""Preparation: what is written, that the number of workers does not matter, and that nothing half-written is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_tokenizers import Fails, KillsItself
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from prepared_sets import corpus, run

from pretrain.config.schema import DatasetEntry
from pretrain.data import indexed_files
from pretrain.data import prepare as prepare_module
from pretrain.data.boundaries import boundary_near, cut
from pretrain.data.files import list_files
from pretrain.data.held_out import HeldOutDataset
from pretrain.data.hold_out import held_out_score
from pretrain.data.indexed_files import IndexedWriter
from pretrain.data.manifest import Manifest, open_dataset
from pretrain.data.prepare import prepare
from pretrain.data.sources import BadDocumentLog, SourceRecord
from pretrain.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, train_bpe
from pretrain.data.workers import Tokenizing, tokenize_records
from pretrain.errors import DataError
from tests.patience import patience
from tests.rotation import in_rotation

ROOT = Path(__file__).parents[3]


def documents(output: Path, split: str) -> list[str]:
    dataset = open_dataset(output)
    indexed = dataset.open_split(split)
    ids = [indexed[i] for i in range(len(indexed))]
    assert all(part[-1] == dataset.tokenizer.eod for part in ids)
    return [dataset.tokenizer.detokenize(part) for part in ids]


def contents(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.iterdir()}


def test_every_document_is_in_one_split_in_source_order(tmp_path: Path):
    source = corpus(tmp_path / "a.jsonl")
    result = run(source, tmp_path / "out")
    wanted = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    train, validation = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "validation")
    assert [text for text in wanted if text in set(train)] == train
    assert [text for text in wanted if text in set(validation)] == validation
    assert sorted(train + validation) == sorted(wanted)
    splits = result.dataset.manifest.splits
    for name, texts in (("train", train), ("validation", validation)):
        assert splits[name].num_documents == len(texts)
        assert splits[name].num_bytes == sum(len(text.encode()) for text in texts)
        assert splits[name].num_tokens == splits[name].num_bytes + len(texts)
        assert splits[name].max_token_id == 256
    result.dataset.verify()


def test_manifest_survives_its_file(tmp_path: Path):
    manifest = run(corpus(tmp_path / "a.jsonl"), tmp_path / "out").dataset.manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.format_version == 1, "data sets that were prepared before must stay readable"


def test_number_of_workers_changes_nothing(tmp_path: Path):
    source = corpus(tmp_path / "a.jsonl", num_documents=1500)
    tokenizer = train_bpe(["document says. " * 9], 300, tmp_path / "tokenizer.json")
    for num_workers in (1, 2, 3):
        run(source, tmp_path / str(num_workers), num_workers=num_workers, tokenizer=tokenizer)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")
    assert isinstance(open_dataset(tmp_path / "2").tokenizer, HuggingFaceTokenizer)


def test_split_follows_the_seed_alone(tmp_path: Path):
    source = corpus(tmp_path / "a.jsonl")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(source, tmp_path / name, seed=seed)
    assert documents(tmp_path / "a", "validation") == documents(tmp_path / "b", "validation")
    assert documents(tmp_path / "a", "validation") != documents(tmp_path / "c", "validation")


@settings(max_examples=15, deadline=None)
@given(num_documents=st.integers(2, 6), fraction=st.sampled_from([1e-6, 0.3, 0.999999]), seed=st.integers(0, 2**31))
def test_both_splits_get_a_document(
    num_documents: int, fraction: float, seed: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("splits")
    source = corpus(folder / "a.jsonl", num_documents)
    result = run(source, folder / "out", validation_fraction=fraction, seed=seed)
    train, validation = documents(folder / "out", "train"), documents(folder / "out", "validation")
    assert train
    assert validation
    wanted = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    # The end of one document may be all that is held out.
    assert sorted("".join(train + validation)) == sorted("".join(wanted))
    assert len(train) + len(validation) in (num_documents, num_documents + 1)
    for name, texts in (("train", train), ("validation", validation)):
        assert result.dataset.manifest.splits[name].num_bytes == sum(len(text.encode()) for text in texts)
    assert {path.name for path in (folder / "out").iterdir()} == {
        "train.bin",
        "train.idx",
        "validation.bin",
        "validation.idx",
        "manifest.json",
    }


def test_held_out_scores_are_uniform_and_independent_of_each_other() -> None:
    count = 20_000
    scores = np.array([[held_out_score(seed, index) for index in range(count)] for seed in (1, 2)])
    assert scores.min() >= 0
    assert scores.max() < 1
    # Five standard errors: of the share below a bound, and of correlations between seeds and between neighbours.
    for bound in (0.01, 0.05, 0.5, 0.9):
        assert np.abs((scores < bound).mean(1) - bound).max() < 5 * (bound * (1 - bound) / count) ** 0.5
    assert abs(np.corrcoef(scores[0], scores[1])[0, 1]) < 5 * count**-0.5
    assert abs(np.corrcoef(scores[0, :-1], scores[0, 1:])[0, 1]) < 5 * count**-0.5


@pytest.mark.parametrize("fraction", [1e-9, 0.2, 1 - 1e-9])
def test_documents_with_the_lowest_scores_are_held_out(tmp_path: Path, fraction: float) -> None:
    """A validation split left empty gets the shortest document; a training split left empty keeps the longest one."""
    source = corpus(tmp_path / "a.jsonl")
    run(source, tmp_path / "out", validation_fraction=fraction, seed=3)
    wanted = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    scores = [held_out_score(3, index) for index in range(len(wanted))]
    held_out = {index for index, score in enumerate(scores) if score < fraction}
    held_out = held_out or {min(range(len(wanted)), key=lambda index: (len(wanted[index]), scores[index]))}
    if len(held_out) == len(wanted):
        held_out -= {max(range(len(wanted)), key=lambda index: (len(wanted[index]), scores[index]))}
    assert documents(tmp_path / "out", "validation") == [wanted[index] for index in sorted(held_out)]


def test_bytes_of_the_text_are_counted_and_not_its_letters(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    texts = [f"größer {i} 漢字" for i in range(9)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    splits = run(source, tmp_path / "out").dataset.manifest.splits
    assert sum(split.num_bytes for split in splits.values()) == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"field_name": "copy"},
        {"validation_fraction": 0.3},
        {"tokenizer": "bpe"},
        {"time": 1},
        {"as_text": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_every_argument_and_the_files_are_part_of_the_request(tmp_path: Path, other: dict[str, object]) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"text {i}", "copy": f"text {i}"}) + "\n" for i in range(9)))
    os.utime(source, ns=(0, 0))
    run(source, tmp_path / "out")
    assert run(source, tmp_path / "out").was_already_there
    options = dict(other)
    if options.pop("time", None):
        os.utime(source, ns=(1, 1))
    if "tokenizer" in options:
        options["tokenizer"] = train_bpe(["text " * 9], 260, tmp_path / "t.json")
    with pytest.raises(DataError, match="other files or with other arguments"):
        run(source, tmp_path / "out", **options)


def test_the_content_fingerprint_is_of_the_tokens_and_their_tokenizer(tmp_path: Path) -> None:
    manifest = run(corpus(tmp_path / "a.jsonl"), tmp_path / "out").dataset.manifest
    changed = [replace(manifest, tokenizer=replace(manifest.tokenizer, fingerprint="0"))]
    for name, split in manifest.splits.items():
        for field in ("bin_sha256", "idx_sha256"):
            changed.append(replace(manifest, splits={**manifest.splits, name: replace(split, **{field: "0"})}))
    assert len({other.content_fingerprint for other in [manifest, *changed]}) == 6
    # Where the tokens came from plays no part.
    assert replace(manifest, request_fingerprint="0", num_skipped=3).content_fingerprint == manifest.content_fingerprint


def test_everything_is_on_disk_before_the_folder_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    fsync = os.fsync

    def record(descriptor: int) -> None:
        assert not (tmp_path / "out").exists()
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr("parallel.machine.atomic_write.os.fsync", record)
    run(corpus(tmp_path / "a.jsonl"), tmp_path / "out")
    assert {path.stat().st_ino for path in [tmp_path / "out", *(tmp_path / "out").iterdir()]} <= synced


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.9])
def test_of_a_single_document_the_end_is_held_out(tmp_path: Path, fraction: float) -> None:
    text = "".join(f"Line {i} of paragraph {i // 10}, größer.\n" + "\n" * (i % 10 == 9) for i in range(1000))
    (tmp_path / "book.txt").write_text(text)
    result = run(tmp_path / "book.txt", tmp_path / "out", validation_fraction=fraction)
    (first,), (last,) = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "validation")
    assert first + last == text
    assert first.endswith("\n\n"), "between two paragraphs"
    assert len(last) == pytest.approx(fraction * len(text), abs=0.01 * len(text))
    splits = result.dataset.manifest.splits
    assert (splits["train"].num_bytes, splits["validation"].num_bytes) == (len(first.encode()), len(last.encode()))
    result.dataset.verify()


def test_a_document_of_one_letter_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"only one document, of one character.*--validation-fraction 0"):
        run(tmp_path / "a.txt", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_nothing_need_be_held_out(tmp_path: Path) -> None:
    source = corpus(tmp_path / "a.jsonl")
    result = run(source, tmp_path / "out", validation_fraction=0.0)
    assert len(documents(tmp_path / "out", "train")) == 40
    split = result.dataset.manifest.splits["validation"]
    assert (split.num_documents, split.num_tokens, split.num_bytes, split.bin_bytes) == (0, 0, 0, 0)
    result.dataset.verify()
    with_some = run(source, tmp_path / "other").dataset
    entries = [DatasetEntry(str(tmp_path / name)) for name in ("out", "other")]
    assert len(HeldOutDataset(entries[:1], 16)) == 0
    assert HeldOutDataset(entries, 16).num_bytes == with_some.manifest.splits["validation"].num_bytes


def test_documents_may_be_empty_or_alike_and_folders_named_at_will(tmp_path: Path) -> None:
    """No document for a text of blanks or nothing, one for every other; a shell would take the folder's name apart."""
    folder = tmp_path / 'it\'s "Käse", für #1 $HOME'
    folder.mkdir()
    texts = ["aa", "", "aa", "ü", " ", "", "aa", "b"]
    (folder / "a b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    result = run(folder / "a b.jsonl", folder / "out", validation_fraction=0.0)
    ids = np.fromfile(folder / "out" / "train.bin", dtype=np.uint16).tolist()
    assert ids == [token for text in texts if text.strip() for token in (*text.encode(), result.dataset.tokenizer.eod)]
    assert documents(folder / "out", "train") == [text for text in texts if text.strip()]
    assert result.dataset.manifest.num_empty == 3


def test_documents_to_hold_out_can_be_named(tmp_path: Path) -> None:
    mine, theirs = corpus(tmp_path / "a.jsonl", 9), tmp_path / "held-out"
    theirs.mkdir()
    for number in range(3):
        (theirs / f"{number}.txt").write_text(f"other text {number}")
    run(mine, tmp_path / "out", validation_inputs=[str(theirs)])
    assert documents(tmp_path / "out", "train") == [json.loads(line)["text"] for line in mine.read_text().splitlines()]
    assert documents(tmp_path / "out", "validation") == [f"other text {number}" for number in range(3)]
    assert run(mine, tmp_path / "out", validation_inputs=[str(theirs)]).was_already_there
    with pytest.raises(DataError, match="other files or with other arguments"):
        prepare([str(mine), str(theirs)], tmp_path / "out", ByteTokenizer(), validation_fraction=0.2, num_workers=1)
    (theirs / "3.txt").symlink_to(mine)
    with pytest.raises(DataError, match=r"3\.txt is in .*a\.jsonl and again in .*held-out: its documents would count"):
        run(mine, tmp_path / "again", validation_inputs=[str(theirs)])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_long_documents_can_be_cut(tmp_path: Path, num_workers: int) -> None:
    texts = [f"A sentence {i}. " * 50 + "\n\n" + "word " * 80 for i in range(6)] + ["short"]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(source, tmp_path / "out", cut_documents=300, validation_fraction=0.0, num_workers=num_workers)
    parts = documents(tmp_path / "out", "train")
    assert "".join(parts) == "".join(texts)
    assert max(map(len, parts)) <= 300
    assert "short" in parts
    assert all(part.endswith((". ", "\n\n", "word ", "short")) for part in parts)
    with pytest.raises(DataError, match="other arguments"):
        run(source, tmp_path / "out", cut_documents=400, validation_fraction=0.0)
    with pytest.raises(DataError, match=r"--cut-documents 1 is impossible"):
        run(source, tmp_path / "out2", cut_documents=1)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab. \n", max_size=200), most=st.integers(2, 60), position=st.integers(0, 200))
def test_cut_texts_are_whole_again(text: str, most: int, position: int) -> None:
    parts = cut(text, most)
    assert "".join(parts) == text
    assert all(len(part) <= most for part in parts)
    assert all(len(part) >= most // 2 for part in parts[:-1])
    if len(text) >= 2:
        assert 0 < boundary_near(text, position) < len(text)
        assert abs(boundary_near(text, position) - min(max(position, 1), len(text) - 1)) <= max(1, len(text) // 10)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    dtype=st.sampled_from([np.uint16, np.int32]),
    at_once=st.integers(1, 7),
)
def test_the_files_are_those_of_megatrons_builder(
    lengths: list[int], dtype: type, at_once: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("indexed")
    generator = np.random.default_rng(len(lengths))
    texts = [generator.integers(0, 60_000, length).astype(dtype) for length in lengths]
    builder = IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=dtype)
    with pytest.MonkeyPatch.context() as patch, IndexedWriter(folder / "ours", dtype) as writer:
        patch.setattr(indexed_files, "_DOCUMENTS_AT_ONCE", at_once)
        for ids in texts:
            builder.add_document(ids, [len(ids)])
            writer.add(ids, 7)
        builder.finalize(str(folder / "theirs.idx"))
        writer.finish()
    for ending in (".bin", ".idx"):
        assert (folder / f"ours{ending}").read_bytes() == (folder / f"theirs{ending}").read_bytes()
    written = writer.written
    assert (written.num_documents, written.num_bytes) == (len(lengths), 7 * len(lengths))
    assert (written.num_tokens, written.max_token_id) == (sum(lengths), max(int(ids.max()) for ids in texts))


class Interrupted(Exception):
    """Stands for power that fails."""


@pytest.mark.parametrize(
    ("options", "num_workers"),
    in_rotation(
        [
            (options, num_workers)
            for options in ({}, {"cut_documents": 40}, {"validation_fraction": 1e-9})
            for num_workers in (1, 2)
        ]
    ),
    ids=str,
)
def test_a_preparation_that_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int, options: dict[str, object]
) -> None:
    """Whatever had reached the disk since the last note; and only the documents after it are tokenised again."""
    source = corpus(tmp_path / "a.jsonl", 600)
    source.write_text(source.read_text().replace("document 5 ", "").replace('says 81. "', 'says 81. " broken', 1))
    options = {"max_bad": 3, "num_workers": num_workers} | options
    whole = run(source, tmp_path / "whole", **options).dataset
    add, left = IndexedWriter.add, 400

    def add_until_the_power_fails(self: IndexedWriter, *document: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            self.sync()
            raise Interrupted
        add(self, *document)

    monkeypatch.setattr(prepare_module, "NOTE_EVERY_S", 0.0)
    monkeypatch.setattr(IndexedWriter, "add", add_until_the_power_fails)
    with pytest.raises(Interrupted):
        run(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    # Those that were not written, those of the record that was being written, and all once more if one has to move, as one
    # of several equal parts has.
    total = sum(split.num_documents for split in whole.manifest.splits.values())
    left = total - 380 + (total if options.keys() & {"validation_fraction", "cut_documents"} else 0)
    run(source, tmp_path / "out", **options)
    ours, theirs = contents(tmp_path / "out"), contents(tmp_path / "whole")
    assert ours == theirs
    assert whole.manifest.num_skipped > 0


def test_another_request_does_not_go_on_with_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = corpus(tmp_path / "a.jsonl", 60)
    monkeypatch.setattr(prepare_module, "NOTE_EVERY_S", 0.0)
    add = IndexedWriter.add

    def fail_at_the_end(self: IndexedWriter, *document: Any) -> None:
        if self.written.num_documents == 30:
            raise Interrupted
        add(self, *document)

    with monkeypatch.context() as patch:
        patch.setattr(IndexedWriter, "add", fail_at_the_end)
        with pytest.raises(Interrupted):
            run(source, tmp_path / "out")
    assert (tmp_path / ".out.preparing" / "progress.json").exists()
    run(source, tmp_path / "out", seed=2)
    run(source, tmp_path / "afresh", seed=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "afresh")
    assert not (tmp_path / ".out.preparing").exists()


@pytest.mark.parametrize("fraction", [1.0, -0.1, 2.0, float("nan")])
def test_impossible_validation_fraction(tmp_path: Path, fraction: float):
    with pytest.raises(DataError, match=r"validation fraction of .* is impossible"):
        run(corpus(tmp_path / "a.jsonl"), tmp_path / "out", validation_fraction=fraction)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_bad_documents_stop_it_or_are_counted(tmp_path: Path, num_workers: int):
    source = corpus(tmp_path / "a.jsonl")
    source.write_text(source.read_text() + "{broken\n" + '{"text": ""}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 41: not valid JSON"):
        run(source, tmp_path / "out", num_workers=num_workers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]
    manifest = run(source, tmp_path / "out", num_workers=num_workers, max_bad=1).dataset.manifest
    assert (manifest.num_skipped, manifest.num_empty) == (1, 1)
    assert "line 41" in manifest.skipped_examples[0]


def test_same_request_is_found_and_another_is_refused(tmp_path: Path):
    source = corpus(tmp_path / "a.jsonl")
    assert not run(source, tmp_path / "out").was_already_there
    before = contents(tmp_path / "out")
    assert run(source, tmp_path / "out", num_workers=2).was_already_there
    with pytest.raises(DataError, match=r"other files or with other arguments.*--overwrite"):
        run(source, tmp_path / "out", seed=7)
    corpus(source, 41)
    with pytest.raises(DataError, match="other files or with other arguments"):
        run(source, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert not run(source, tmp_path / "out", overwrite=True).was_already_there
    assert contents(tmp_path / "out") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_overwrite_mends_a_damaged_set_but_never_touches_a_strange_folder(tmp_path: Path):
    source = corpus(tmp_path / "a.jsonl")
    run(source, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_text("{")
    run(source, tmp_path / "out", overwrite=True)
    open_dataset(tmp_path / "out").verify()
    (tmp_path / "out" / "thesis.tex").write_text("irreplaceable")
    with pytest.raises(DataError, match=r"not a prepared data set \(it holds thesis\.tex\)"):
        run(source, tmp_path / "out", overwrite=True)
    with pytest.raises(DataError, match="is not a prepared data set"):
        run(source, source, overwrite=True)


def test_failed_overwrite_keeps_the_old_set(tmp_path: Path):
    source = corpus(tmp_path / "a.jsonl")
    run(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    source.write_text("{broken\n")
    with pytest.raises(DataError, match="not valid JSON"):
        run(source, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == before


def test_replacement_that_was_cut_off_is_undone(tmp_path: Path):
    source = corpus(tmp_path / "a.jsonl")
    run(source, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    assert run(source, tmp_path / "out").was_already_there


def test_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self, *document):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_module.IndexedWriter, "add", full)
    source = corpus(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
        run(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_second_preparation_of_one_output_waits_outside(tmp_path: Path):
    from pretrain.data.staging import staged_folder

    with (
        staged_folder(tmp_path / "out") as staging,
        pytest.raises(DataError, match="another process is preparing the same output"),
        staged_folder(tmp_path / "out"),
    ):
        pass
    assert not staging.exists()
    assert (tmp_path / "out").is_dir()


def test_tokenizer_that_exceeds_its_vocabulary_names_the_document(tmp_path: Path):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = 100
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: the tokenizer gave id 256, past its own vocabulary of 100"):
        run(corpus(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer=tokenizer)


def test_death_of_a_worker_is_noticed(tmp_path: Path):
    (file,) = list_files([str(corpus(tmp_path / "a.jsonl"))])
    # More than pipes hold: some are on their way when the worker dies.
    records = [SourceRecord(file, row, b"x" * 600_000, 1) for row in range(1, 21)]
    # A loader of another test may wait for its garbage collection.
    before = set(multiprocessing.active_children())
    with pytest.raises(DataError, match=r"process died at .*a\.jsonl, line 1 .*fewer --workers"):
        list(tokenize_records(records, Tokenizing(KillsItself(), "text"), num_workers=2))
    with pytest.raises(ArithmeticError, match="a defect of ours"):
        list(tokenize_records(records, Tokenizing(Fails(), "text"), num_workers=2))
    assert set(multiprocessing.active_children()) <= before


SLOW_PREPARATION = """
import sys, time
from pathlib import Path
from pretrain.data import prepare as module
from pretrain.data.tokenizer import ByteTokenizer

original = module.IndexedWriter.add
def slow(self, *document):
    original(self, *document)
    self.sync()
    Path(sys.argv[3]).touch()
    time.sleep(0.05)

if __name__ == "__main__":
    module.IndexedWriter.add = slow
    module.prepare([sys.argv[1]], sys.argv[2], ByteTokenizer(), num_workers=2)
"""


def wait_for(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s * patience()
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    # An orphan that nobody collects stays as a zombie (state Z): that is an end, too.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_killed_preparation_leaves_nothing_that_opens_and_no_process(tmp_path: Path):
    source, output = corpus(tmp_path / "a.jsonl", 2000), tmp_path / "out"
    script, started = tmp_path / "slow.py", tmp_path / "started"
    script.write_text(SLOW_PREPARATION)
    command = [sys.executable, "-W", "ignore", str(script), str(source), str(output), str(started)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    wait_for(started.exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    assert len(children) >= 2
    assert not output.exists()
    assert np.fromfile(tmp_path / ".out.preparing" / "train.bin", dtype=np.uint16).size > 0
    with pytest.raises(DataError, match="no such data set"):
        open_dataset(output)
    with pytest.raises(DataError, match="not a prepared data set"):
        open_dataset(tmp_path / ".out.preparing")
    wait_for(lambda: not any(is_running(child) for child in children))
    run(source, output)
    open_dataset(output).verify()
    assert not (tmp_path / ".out.preparing").exists()


def test_bad_document_log_keeps_a_bounded_number_of_examples():
    log = BadDocumentLog(limit=1000)
    for i in range(1000):
        log.add(f"line {i}", "bad")
    assert (log.num_bad, len(log.examples)) == (1000, 20)
