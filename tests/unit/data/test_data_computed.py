"""The order that is computed: permutations, passes over a data set, and blends, counted against what they must serve."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.schema import DatasetEntry
from pretrain.data.computed import ComputedBlend, ComputedSamples
from pretrain.data.dataset import TrainDataset, build_train_dataset
from pretrain.data.manifest import TRAIN, open_dataset
from pretrain.data.permutation import mixed, permuted
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.errors import ConfigError, DataError

LENGTH, NUM_TOKENS = 7, 200
PER_PASS = (NUM_TOKENS - 1) // LENGTH


def make(folder: Path, name: str = "a", first: int = 0) -> DatasetEntry:
    """Documents of 40 tokens of which no part as long as a sample occurs twice: a sample tells where it was cut."""
    letters = [chr(33 + i % 90) + chr(33 + first + i // 90) for i in range(98)]
    text = "".join(letters)[: NUM_TOKENS - 5]
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text[i : i + 39]}) + "\n" for i in range(0, len(text), 39)))
    prepare([str(source)], folder / name, ByteTokenizer(), validation_fraction=0, num_workers=1)
    return DatasetEntry(str(folder / name))


def build(entries: list[DatasetEntry], num_samples: int, seed: int = 1, length: int = LENGTH) -> TrainDataset:
    return build_train_dataset(
        entries,
        cache_dir="/nowhere/that/can/be/written",
        sequence_length=length,
        num_samples=num_samples,
        seed=seed,
        tokenizer=ByteTokenizer(),
        shuffle="samples",
    )


def ids_of(entry: DatasetEntry) -> list[int]:
    ids: list[int] = np.fromfile(Path(entry.path) / "train.bin", dtype=np.uint16).tolist()
    assert len(ids) == NUM_TOKENS
    return ids


def starts(dataset: TrainDataset, entry: DatasetEntry, first: int, end: int) -> list[int]:
    """Places in the file where the samples of a range begin."""
    ids = ids_of(entry)
    windows = {tuple(ids[i : i + LENGTH + 1]): i for i in range(len(ids) - LENGTH)}
    assert len(windows) == len(ids) - LENGTH
    found = []
    for number in range(first, end):
        sample = dataset[number]
        assert sample["position_ids"].tolist() == list(range(LENGTH))
        assert sample["loss_mask"].tolist() == [1.0] * LENGTH
        found.append(windows[(*sample["tokens"].tolist(), int(sample["labels"][-1]))])
    return found


@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_permutation_takes_every_place_once(size: int, key: int) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_permutations_of_large_sizes_stay_inside_and_meet_nowhere() -> None:
    size = 10**12 + 7
    places = {permuted(index, size, 5) for index in range(2000)}
    assert len(places) == 2000
    assert min(places) >= 0
    assert max(places) < size
    # The mean of 2,000 even draws is within 4 of its deviations, which are 0.0065 of the size.
    assert abs(sum(places) / 2000 / size - 0.5) < 0.026


def test_neighbours_and_keys_are_permuted_apart() -> None:
    """Hardly two of 1,000 differences between neighbours' places agree; equal places under two keys are chance."""
    size = 100_003
    places = [permuted(index, size, 1) for index in range(1001)]
    differences = Counter((b - a) % size for a, b in pairwise(places))
    assert differences.most_common(1)[0][1] <= 3
    assert sum(place == permuted(index, size, 2) for index, place in enumerate(places)) <= 3
    assert mixed(1, 2) != mixed(2, 1) != mixed(2, 1, 0)


def test_every_pass_serves_every_sample_of_its_cut_once(tmp_path: Path) -> None:
    """Cuts are a sample's length apart, and begin where the pass has it."""
    entry = make(tmp_path)
    dataset = build([entry], 12 * PER_PASS)
    passes = [starts(dataset, entry, n * PER_PASS, (n + 1) * PER_PASS) for n in range(12)]
    left_over = (NUM_TOKENS - 1) % LENGTH
    for found in passes:
        first = min(found)
        assert 0 <= first <= left_over
        assert sorted(found) == [first + LENGTH * i for i in range(PER_PASS)]
    assert len({min(found) for found in passes}) > 1
    assert len({tuple(place - min(found) for place in found) for found in passes}) == 12


def test_the_order_is_that_of_seed_and_number_and_not_of_how_many_are_asked_for(tmp_path: Path) -> None:
    entry = make(tmp_path)
    short, long = build([entry], 9), build([entry], 500)
    assert starts(short, entry, 0, 9) == starts(long, entry, 0, 9)
    assert starts(build([entry], 40, seed=2), entry, 0, 28) != starts(long, entry, 0, 28)
    with pytest.raises(IndexError):
        short[9]


def test_a_blend_serves_each_set_in_its_own_order_by_its_weight(tmp_path: Path) -> None:
    entries = [replace(make(tmp_path, "a"), weight=3.0), replace(make(tmp_path, "b", 40), weight=1.0)]
    ids_of_both = [ids_of(entry) for entry in entries]
    num_blocks, block = 3, 256
    dataset = build(entries, num_blocks * block)
    cut: list[list[tuple[int, ...]]] = [[], []]
    for number in range(num_blocks * block):
        sample = tuple(dataset[number]["tokens"].tolist())
        (of,) = [i for i, ids in enumerate(ids_of_both) if _holds(ids, sample)]
        cut[of].append(sample)
        if (number + 1) % block == 0:
            assert len(cut[0]) == 3 * len(cut[1])
    # The first samples of a set have been served, each once.
    for of, entry in enumerate(entries):
        stream = ComputedSamples(open_dataset(entry.path), TRAIN, LENGTH, 1, of)
        first = [tuple(stream[i]["tokens"].tolist()) for i in range((576, 192)[of])]
        assert Counter(cut[of]) == Counter(first)
        assert cut[of] != first


def _holds(ids: list[int], sample: tuple[int, ...]) -> bool:
    return any(tuple(ids[i : i + LENGTH]) == sample for i in range(len(ids) - LENGTH))


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=24), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_blocks_of_a_blend_hold_each_number_once_and_the_shares_to_a_sample(weights: list[float], seed: int) -> None:
    blend = ComputedBlend(weights, seed)
    total = sum(map(Fraction, weights))
    largest = max(range(len(weights)), key=weights.__getitem__)
    for number in (0, 1, 7, 10**9):
        before, behind = blend.counts(number), blend.counts(number + 1)
        assert sum(behind) - sum(before) == blend.block
        assert all(end >= first for first, end in zip(before, behind, strict=True))
        for stream, weight in enumerate(weights):
            missing = Fraction(weight) / total * number * blend.block - before[stream]
            assert 0 <= missing < 1 if stream != largest else -len(weights) < missing <= 0
    served = [blend[index] for index in range(3 * blend.block, 4 * blend.block)]
    first, end = blend.counts(3), blend.counts(4)
    expected = {(stream, i) for stream in range(len(weights)) for i in range(first[stream], end[stream])}
    assert Counter(served) == Counter(expected)


def test_epochs_are_passes_of_this_order_too(tmp_path: Path) -> None:
    entry = replace(make(tmp_path), epochs=2.0)
    dataset = build([entry], 2 * PER_PASS)
    found = starts(dataset, entry, 0, 2 * PER_PASS)
    assert len({*found[:PER_PASS]}) == len({*found[PER_PASS:]}) == PER_PASS
    with pytest.raises(ConfigError, match=f"allow {2 * PER_PASS} "):
        build([entry], 2 * PER_PASS + 1)


def test_an_id_outside_of_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    entry = make(tmp_path)
    file = Path(entry.path) / "train.bin"
    ids = np.fromfile(file, dtype=np.uint16)
    ids[100] = 300
    ids.tofile(file)
    dataset = build([entry], PER_PASS)
    with pytest.raises(DataError, match=r"train\.bin: token 100 has the id 300, outside the vocabulary of 257"):
        _ = [dataset[number] for number in range(PER_PASS)]
