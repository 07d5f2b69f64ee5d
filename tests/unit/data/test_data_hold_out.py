"""Documents are held out by their bytes: what is drawn where they are many, and what is done where a few decide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.hold_out import HoldOut, divide, held_out_score
from pretrain.data.indexed_files import longest_document
from pretrain.data.manifest import PreparedDataset, open_dataset
from pretrain.data.prepare import prepare
from pretrain.data.sources import PairFields
from pretrain.data.tokenizer import ByteTokenizer
from tools.cli import main as megamem

SENTENCE = "Words of a sentence. "


def lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text, "prompt": "p", "answer": text}) + "\n" for text in texts))
    return str(path)


def texts_of(dataset: PreparedDataset, split: str) -> list[str]:
    return [dataset.tokenizer.detokenize(ids) for ids in dataset.open_split(split)]


def prepared(folder: Path, texts: list[str], fraction: float, **options) -> PreparedDataset:
    source = lines(folder / "a.jsonl", texts)
    options = {"num_workers": 1} | options
    return prepare([source], folder / "out", ByteTokenizer(), validation_fraction=fraction, **options).dataset


def long_one_is_drawn(num_documents: int, fraction: float) -> tuple[int, int]:
    """A seed with which exactly one document is drawn, and which it is."""
    for seed in range(1000):
        drawn = [index for index in range(num_documents) if held_out_score(seed, index) < fraction]
        if len(drawn) == 1:
            return seed, drawn[0]
    raise AssertionError("no such seed")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_document_that_is_most_of_the_text_is_not_held_out(tmp_path: Path, num_workers: int) -> None:
    """Three documents, of which the one that is 73 % of the text would be drawn; with a fraction that none comes near."""
    seed, drawn = long_one_is_drawn(3, 0.05)
    sizes = [130, 140]
    sizes.insert(drawn, 730)
    texts = [f"{index}: " + SENTENCE * size for index, size in enumerate(sizes)]
    dataset = prepared(tmp_path, texts, 0.05, seed=seed, num_workers=num_workers)
    (held_out,) = texts_of(dataset, "validation")
    assert len(held_out) == pytest.approx(0.05 * sum(map(len, texts)), abs=100)
    train = texts_of(dataset, "train")
    assert len(train) == 3
    # The end of one document, cut between two sentences, and the two others as they were.
    assert [whole == part for whole, part in zip(texts, train, strict=True)].count(True) == 2
    assert texts[drawn] == train[drawn] + held_out
    assert held_out.startswith("Words")
    dataset.verify()


def test_long_documents_among_many_do_not_decide(tmp_path: Path) -> None:
    """The one that is drawn goes back, and short ones take its place."""
    seed, drawn = long_one_is_drawn(60, 0.02)
    texts = [f"{index} " + SENTENCE * (1000 if index == drawn else 20) for index in range(60)]
    dataset = prepared(tmp_path, texts, 0.02, seed=seed)
    splits = dataset.manifest.splits
    share = splits["validation"].num_bytes / sum(map(len, texts))
    assert 0.016 < share < 0.024
    assert sorted(texts_of(dataset, "train") + texts_of(dataset, "validation")) == sorted(texts)
    assert [text for text in texts if text in set(texts_of(dataset, "train"))] == texts_of(dataset, "train")


def test_pairs_are_never_cut(tmp_path: Path) -> None:
    seed, drawn = long_one_is_drawn(3, 0.05)
    texts = [SENTENCE * (300 if index == drawn else 100 + index) for index in range(3)]
    dataset = prepared(tmp_path, texts, 0.05, seed=seed, pair=PairFields("prompt", "answer"))
    (held_out,) = texts_of(dataset, "validation")
    assert held_out == "p" + min(texts, key=len)
    assert len(texts_of(dataset, "train")) == 2


def test_documents_of_one_character_are_not_cut(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, ["a", "b"], 0.01)
    assert sorted(texts_of(dataset, "train") + texts_of(dataset, "validation")) == ["a", "b"]


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5) | st.integers(1, 10_000), min_size=1, max_size=40),
    fraction=st.floats(1e-6, 0.999),
    seed=st.integers(0, 2**31),
)
def test_every_division_leaves_both_and_comes_as_near_as_documents_allow(
    sizes: list[int], fraction: float, seed: int
) -> None:
    hold_out, total = HoldOut(fraction=fraction, seed=seed), sum(sizes)
    division = divide(hold_out, sizes, can_cut=True)
    held = sum(sizes[index] for index in division.held_out)
    assert division.cut not in division.held_out
    assert len(division.held_out) < len(sizes)
    assert division.held_out or division.cut is not None
    if division.cut is not None:
        assert 0 < division.cut_share < 1
        assert len(sizes) == 1 or sizes[division.cut] > 4
        assert held + division.cut_share * sizes[division.cut] == pytest.approx(fraction * total)
        return
    # Without a cut: at least about half, and if it is too much, then for one document of less than a tenth.
    left = [size for index, size in enumerate(sizes) if index not in division.held_out]
    assert held >= fraction * total / 2 or max(left) <= 4
    longest = max(sizes[index] for index in division.held_out)
    assert held <= fraction * total * 2 or longest <= 0.1 * total or longest <= 4
    if len(sizes) > 1:
        assert divide(hold_out, sizes, can_cut=False).cut is None


@pytest.mark.parametrize(("fraction", "share", "is_about"), [(0.1, 0.049, False), (0.1, 0.051, True), (0.1, 0.199, True),
    (0.1, 0.201, False), (0.9, 0.949, True), (0.9, 0.951, False)])  # fmt: skip
def test_about(fraction: float, share: float, is_about: bool) -> None:
    assert HoldOut(fraction=fraction).is_about(share) is is_about


def test_the_longest_document_of_an_index(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, ["a", "bcd", "ef"], 0.0)
    assert longest_document(dataset.path / "train.idx") == 4
    assert longest_document(dataset.path / "validation.idx") == 0


def test_a_warning_where_few_documents_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(texts: list[str], *options: str) -> str:
        source = lines(tmp_path / "a.jsonl", texts)
        words = ["--output", str(tmp_path / "out"), "--workers", "1", "--overwrite", *options]
        assert megamem(["data", "prepare", source, *words]) == 0
        return capsys.readouterr().err

    many = [f"{index:03} {SENTENCE * 5}"[: len(SENTENCE * 5)] for index in range(200)]
    assert said(many, "--validation-fraction", "0.1") == ""
    assert said(many, "--validation-fraction", "0") == ""
    assert (
        "1 document of 105 bytes, 0.05 of the text, where 0.001 was asked for, decides every validation loss"
        in said(many[:20], "--validation-fraction", "0.001")
    )
    assert "--cut-documents N makes documents of long texts, and --validation INPUT" in said(many[:20])
    held_out = lines(tmp_path / "b.jsonl", many[:2])
    assert "2 held-out documents of --validation among the others too" in said(many, "--validation", held_out)
    assert said(many[2:], "--validation", held_out) == ""
    long = max(range(200), key=lambda index: -held_out_score(1, index))
    texts = [f"{index} {SENTENCE * (100 if index == long else 5)}" for index in range(200)]
    assert "(one is more than half of it)" in said(texts, "--validation-fraction", "0.1")
    assert open_dataset(tmp_path / "out").manifest.splits["validation"].num_documents >= 10


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 6), min_size=2, max_size=60).filter(lambda numbers: len(set(numbers)) > 1),
    fraction=st.sampled_from([0.01, 0.1, 0.5]),
)
def test_equal_documents_stay_together(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("equal")
    dataset = prepared(folder, [f"{number} {SENTENCE}" for number in numbers], fraction)
    train, held_out = texts_of(dataset, "train"), texts_of(dataset, "validation")
    assert not set(train) & set(held_out)
    # Of a few texts one is cut.
    assert len("".join([*train, *held_out])) == sum(len(f"{number} {SENTENCE}") for number in numbers)
    assert train
    assert held_out
    assert dataset.manifest.sources["num_repeated"] == len(numbers) - len(set(numbers))


def test_the_first_of_equal_documents_decides(tmp_path: Path) -> None:
    """So that a corpus without repeats is divided as it always was, and one with some nearly so."""
    texts = [f"{index} {SENTENCE}" for index in range(400)]
    alone = prepared(tmp_path, texts, 0.1)
    drawn = set(texts_of(alone, "validation"))
    assert drawn == {text for index, text in enumerate(texts) if held_out_score(1, index) < 0.1}
    (tmp_path / "again").mkdir()
    repeated = prepared(tmp_path / "again", [*texts, *texts[:50]], 0.1)
    assert set(texts_of(repeated, "validation")) == drawn


def test_one_text_however_often_cannot_be_on_both_sides(tmp_path: Path) -> None:
    """Its end is held out, of each document."""
    dataset = prepared(tmp_path, [SENTENCE] * 3, 0.2)
    train, held_out = texts_of(dataset, "train"), texts_of(dataset, "validation")
    assert (len(train), len(held_out)) == (3, 3)
    assert train[0] + held_out[0] == SENTENCE
