"""Tokens that every epoch serves, counted one by one, and their order: over epochs, seeds, blends, resumptions and
batch sizes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.config.schema import DataConfig, DatasetEntry, RunConfig
from pretrain.data.dataset import TrainDataset, build_train_dataset
from pretrain.data.loader import microbatches
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from pretrain.train import run as run_module
from pretrain.train.run import open_run

NUM_DOCUMENTS, NUM_LETTERS = 8, 5
EPOCH_TOKENS = NUM_DOCUMENTS * (NUM_LETTERS + 1)

# (sequence length, samples, epochs): a length that divides an epoch into n leaves n - 1 samples per block, because the
# last label belongs to the next epoch. So n blocks are n - 1 epochs to the token.
WHOLE_EPOCHS = [(12, 12, 3), (6, 56, 7), (24, 2, 1)]


def make(folder: Path, name: str = "a", first_letter: str = "!", weight: float = 1.0) -> DatasetEntry:
    """Eight documents for training (and one held out) that have no letter in common, within them or between them."""
    letters = [chr(ord(first_letter) + i) for i in range((NUM_DOCUMENTS + 1) * NUM_LETTERS)]
    texts = ["".join(letters[i : i + NUM_LETTERS]) for i in range(0, len(letters), NUM_LETTERS)]
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(source)], folder / name, ByteTokenizer(), validation_fraction=1 / (NUM_DOCUMENTS + 1), num_workers=1)
    assert len(epoch_of(folder / name)) == EPOCH_TOKENS
    return DatasetEntry(str(folder / name), weight)


def epoch_of(path: str | Path) -> list[int]:
    """The tokens of an epoch as they lie on disk."""
    ids: list[int] = np.fromfile(Path(path) / "train.bin", dtype=np.uint16).tolist()
    return ids


def build(
    entries: list[DatasetEntry], cache: Path, sequence_length: int, num_samples: int, seed: int = 1
) -> TrainDataset:
    return build_train_dataset(
        entries,
        cache_dir=cache,
        sequence_length=sequence_length,
        num_samples=num_samples,
        seed=seed,
        tokenizer=ByteTokenizer(),
    )


def tokens(samples: list[dict[str, Any]], key: str = "tokens") -> list[int]:
    return [token for sample in samples for token in sample[key].flatten().tolist()]


def times(epoch: list[int], num_epochs: int) -> Counter[int]:
    return Counter(epoch * num_epochs)


@pytest.mark.parametrize(("sequence_length", "num_samples", "num_epochs"), WHOLE_EPOCHS)
def test_every_token_is_served_once_per_epoch(
    tmp_path: Path, sequence_length: int, num_samples: int, num_epochs: int
) -> None:
    entry = make(tmp_path)
    dataset = build([entry], tmp_path / "cache", sequence_length, num_samples)
    samples = [dataset[i] for i in range(num_samples)]
    expected = times(epoch_of(entry.path), num_epochs)
    assert Counter(tokens(samples)) == expected
    # Ends of documents count in the loss like any other token.
    assert set(tokens(samples, "loss_mask")) == {1.0}
    # The last label of all is the first token of the next epoch, in place of the first token of the first.
    labels = Counter(tokens(samples, "labels"))
    assert labels.total() == expected.total()
    assert (labels - expected).total() <= 1


def test_blends_serve_each_set_by_its_weight_and_every_token_of_it_alike(tmp_path: Path) -> None:
    """The sets have 36 and 12 of 48 samples, which are nine and three epochs."""
    entries = [make(tmp_path, "a", "!", weight=3.0), make(tmp_path, "b", "P", weight=1.0)]
    first, second = (epoch_of(entry.path) for entry in entries)
    assert not (set(first) & set(second)) - {ByteTokenizer().eod}
    dataset = build(entries, tmp_path / "cache", 12, 48)
    assert Counter(tokens([dataset[i] for i in range(48)])) == times(first, 9) + times(second, 3)


@pytest.mark.parametrize(("first_epochs", "second_epochs"), [(9.0, 3.0), (1.0, 1.0), (2.5, 0.5), (1.0, 7.0)])
def test_blends_by_epochs_serve_every_token_as_often_as_they_say(
    tmp_path: Path, first_epochs: float, second_epochs: float
) -> None:
    """A pass has three whole samples of 12: no token is served more often than there are epochs, and whole epochs serve
    the tokens of each sample as often as there are.
    """
    entries = [
        replace(make(tmp_path, "a", "!"), epochs=first_epochs),
        replace(make(tmp_path, "b", "P"), epochs=second_epochs),
    ]
    num_samples = math.floor(3 * (first_epochs + second_epochs))
    dataset = build(entries, tmp_path / "cache", 12, num_samples)
    counts = Counter(tokens([dataset[i] for i in range(num_samples)]))
    assert counts.total() == 12 * num_samples
    for entry, epochs in zip(entries, (first_epochs, second_epochs), strict=True):
        letters = set(epoch_of(entry.path)) - {ByteTokenizer.eod}
        assert max(counts[letter] for letter in letters) <= math.ceil(epochs)
        # The first pass has 36 of the 48 tokens of an epoch, and so on.
        served = sum(counts[letter] for letter in letters)
        assert served == pytest.approx(epochs * 36 * 40 / 48, abs=3 + 12 * (epochs % 1 > 0))
    with pytest.raises(ConfigError, match=rf"reads {num_samples + 1} samples of 12 tokens, .* allow {num_samples} \("):
        build(entries, tmp_path / "cache", 12, num_samples + 1)


def test_one_set_by_epochs_is_read_no_longer_than_that(tmp_path: Path) -> None:
    """Seven samples of 6 to a pass, and two passes."""
    entry = replace(make(tmp_path), epochs=2.0)
    dataset = build([entry], tmp_path / "cache", 6, 14)
    counts = Counter(tokens([dataset[i] for i in range(14)]))
    assert counts == times(epoch_of(entry.path), 2) & counts
    with pytest.raises(ConfigError, match=r"lower train\.num_steps to 14 / train\.global_batch_size"):
        build([entry], tmp_path / "cache", 6, 15)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_counts_hold_across_a_resumption_with_another_batch_layout_and_length(tmp_path: Path, num_workers: int) -> None:
    """Two steps of 8 on two ranks, then one of 12 on three, then seven of 4 on one: 56 samples, which are seven epochs."""
    entry = make(tmp_path)
    served, consumed = [], 0
    # Global batch, microbatch, data-parallel ranks, steps: each leg knows only as many samples as are to be consumed by
    # its end.
    for global_batch_size, micro_batch_size, data_size, num_steps in ((8, 2, 2, 2), (12, 4, 3, 1), (4, 1, 1, 7)):
        end = consumed + num_steps * global_batch_size
        dataset = build([entry], tmp_path / "cache", 6, end)
        readers = [
            microbatches(
                dataset,
                start_sample=consumed,
                micro_batch_size=micro_batch_size,
                data_rank=rank,
                data_size=data_size,
                num_workers=num_workers,
            )
            for rank in range(data_size)
        ]
        for _ in range(num_steps):
            for _ in range(global_batch_size // (micro_batch_size * data_size)):
                served += [next(reader) for reader in readers]
        consumed = end
    assert consumed == 56
    assert Counter(tokens(served)) == times(epoch_of(entry.path), 7)
    whole = build([entry], tmp_path / "another cache", 6, 56)
    assert tokens(served) == tokens([whole[i] for i in range(56)])


def stream_of(entry: DatasetEntry, cache: Path, num_epochs: int, seed: int = 1) -> list[int]:
    """The concatenated epochs. A block holds one half-epoch sample, so they are served as they are cut."""
    dataset = build([entry], cache, EPOCH_TOKENS // 2, 2 * num_epochs, seed)
    return tokens([dataset[i] for i in range(len(dataset))])


def served_order(stream: list[int], dataset: TrainDataset, sequence_length: int) -> list[int]:
    """Places in the stream at which each sample was cut, in samples."""
    places: list[int] = []
    for sample in (dataset[i] for i in range(len(dataset))):
        window = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
        places.append(
            next(
                place
                for place in range(len(stream) // sequence_length)
                if place not in places and stream[place * sequence_length : (place + 1) * sequence_length + 1] == window
            )
        )
    return places


def parts(items: list[Any], size: int) -> list[list[Any]]:
    assert len(items) % size == 0
    return [items[i : i + size] for i in range(0, len(items), size)]


def all_differ(orders: list[Any]) -> bool:
    return len({tuple(order) for order in orders}) == len(orders)


def test_every_epoch_has_an_order_of_documents_of_its_own(tmp_path: Path) -> None:
    """Two of seven orders of eight documents agree by chance with one seed in two thousand."""
    entry = make(tmp_path)
    epochs = parts(stream_of(entry, tmp_path / "cache", 6), EPOCH_TOKENS)
    on_disk = epoch_of(entry.path)
    assert all(Counter(epoch) == Counter(on_disk) for epoch in epochs)
    assert all_differ([*epochs, on_disk])


def test_every_block_of_samples_is_shuffled_in_a_way_of_its_own(tmp_path: Path) -> None:
    """Two of eight orders of seven samples agree by chance with one seed in two hundred."""
    entry = make(tmp_path)
    stream = stream_of(entry, tmp_path / "cache", 7)
    blocks = parts(served_order(stream, build([entry], tmp_path / "cache", 6, 49), 6), 7)
    for number, block in enumerate(blocks):
        assert sorted(block) == list(range(7 * number, 7 * (number + 1)))
    assert all_differ([list(range(7)), *([place % 7 for place in block] for block in blocks)])


def test_both_orders_depend_on_all_of_the_seed(tmp_path: Path) -> None:
    """The high half of the seed counts too."""
    entry = make(tmp_path)
    streams, orders = [], []
    for seed in (1, 2, 1 + (1 << 32), 2 + (1 << 32)):
        streams.append(stream_of(entry, tmp_path / "cache", 2, seed))
        orders.append(served_order(streams[-1], build([entry], tmp_path / "cache", 6, 14, seed), 6))
    assert all_differ(streams)
    assert all_differ(orders)


def test_lengths_do_not_meet_in_the_index(tmp_path: Path) -> None:
    """Four blocks each, from one cache folder and from two."""
    entry = make(tmp_path)
    for sequence_length, num_samples in ((12, 12), (6, 28)):
        shared, own = (
            build([entry], tmp_path / cache, sequence_length, num_samples) for cache in ("cache", str(sequence_length))
        )
        assert tokens([shared[i] for i in range(num_samples)]) == tokens([own[i] for i in range(num_samples)])


@pytest.mark.parametrize(("run_seed", "data_seed", "expected"), [(3, None, 3), (3, 7, 7), (3, 0, 0), (0, None, 0)])
def test_the_data_have_a_seed_of_their_own_where_one_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_seed: int, data_seed: int | None, expected: int
) -> None:
    class Asked(Exception):
        pass

    def ask(entries: object, *, seed: int, **options: Any) -> None:
        raise Asked(seed)

    config = replace(RunConfig(), seed=run_seed, data=DataConfig(datasets=(make(tmp_path),), seed=data_seed))
    monkeypatch.setattr(run_module, "_checkpoint_to_go_on_from", lambda *arguments, **options: None)
    monkeypatch.setattr(run_module, "done_by_main", lambda work: work())
    monkeypatch.setattr(run_module, "build_train_dataset", ask)
    with pytest.raises(Asked) as asked:
        # The data come before anything that needs ranks.
        open_run(config, RunFolder(tmp_path / "run"), groups=None)  # type: ignore[arg-type]
    assert asked.value.args == (expected,)
