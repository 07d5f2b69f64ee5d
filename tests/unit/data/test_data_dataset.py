"""Training samples: every token in turn, an order that outlives the length of a run, and data that does not fit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import pretrain.data.blended as blended_module
from pretrain.config.schema import DatasetEntry
from pretrain.data.blend import check_blend
from pretrain.data.blended import BlendIndex
from pretrain.data.dataset import TrainDataset, build_train_dataset
from pretrain.data.index_files import open_index
from pretrain.data.manifest import MANIFEST_FILE
from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer, train_bpe
from pretrain.errors import DataError
from tests.free_ports import free_ports


def make(folder: Path, texts: list[str], name: str = "data", **options) -> DatasetEntry:
    """A prepared data set with one document per text, and one or two more that are held out."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"tokenizer": ByteTokenizer(), "num_workers": 1, "validation_fraction": 1e-9} | options
    weight = options.pop("weight", 1.0)
    prepare([str(source)], folder / name, options.pop("tokenizer"), **options)
    return DatasetEntry(str(folder / name), weight)


def build(entries: list[DatasetEntry], cache: Path, **options) -> TrainDataset:
    options = {"sequence_length": 16, "num_samples": 10, "seed": 1, "tokenizer": ByteTokenizer()} | options
    return build_train_dataset(entries, cache_dir=cache, **options)


def rows(dataset: TrainDataset, count: int | None = None) -> list[list[int]]:
    """Each sample as its sequence_length + 1 ids."""
    samples = [dataset[i] for i in range(len(dataset) if count is None else count)]
    return [[*sample["tokens"].tolist(), int(sample["labels"][-1])] for sample in samples]


TEXTS = [f"document number {i} " * (i % 4 + 1) for i in range(12)]


def test_items_are_what_the_model_takes(tmp_path: Path):
    dataset = build([make(tmp_path, TEXTS)], tmp_path / "cache")
    assert len(dataset) == 10
    sample = dataset[0]
    assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert all(value.shape == (16,) for value in sample.values())
    assert sample["tokens"].dtype == sample["labels"].dtype == sample["position_ids"].dtype == torch.int64
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert torch.equal(sample["loss_mask"], torch.ones(16))
    assert torch.equal(sample["position_ids"], torch.arange(16))
    with pytest.raises(IndexError):
        dataset[10]


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=9),
    sequence_length=st.integers(1, 24),
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 2**63),
)
def test_stream_is_every_document_once_per_epoch_without_a_gap(
    lengths: list[int], sequence_length: int, num_samples: int, seed: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("stream")
    entry = make(folder, [chr(ord("a") + i) * length for i, length in enumerate(lengths)], validation_fraction=0.0)
    train = np.fromfile(Path(entry.path) / "train.bin", dtype=np.uint16).tolist()
    block = (len(train) - 1) // sequence_length
    assume(block > 0)
    options = {"sequence_length": sequence_length, "seed": seed}
    dataset = build([entry], folder / "cache", num_samples=num_samples, **options)
    # One block of samples is an epoch, but for a tail that is shorter than a sample and goes on into the next block.
    served = [
        token for row in rows(build([entry], folder / "cache", num_samples=block, **options)) for token in row[:-1]
    ]
    assert len(served) == block * sequence_length
    assert not Counter(served) - Counter(train)
    assert len(train) - len(served) <= sequence_length
    # A longer run begins with the shorter one.
    longer = build([entry], folder / "cache", num_samples=num_samples + 3 * block, **options)
    assert rows(longer, num_samples) == rows(dataset)


def test_first_epoch_serves_each_token_once(tmp_path: Path):
    entry = make(tmp_path, [f"{i:03d}." for i in range(65)])
    # 64 documents of 5 tokens; the last token of an epoch is a label only.
    dataset = build([entry], tmp_path / "cache", sequence_length=11, num_samples=29)
    tokens = [token for row in rows(dataset) for token in row[:-1]]
    assert len(tokens) == 319
    text = bytes(token for token in tokens if token < 256).decode()
    assert sum(tokens.count(ord(digit)) for digit in "0123456789") == 192
    assert text.count(".") >= 63


def test_order_depends_on_the_seed(tmp_path: Path):
    entry = make(tmp_path, TEXTS)
    first, again, other = (rows(build([entry], tmp_path / "cache", seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert rows(build([entry], tmp_path / "another cache", seed=1)) == first


def test_blend_follows_weights_and_keeps_its_order_when_lengthened(tmp_path: Path):
    entries = [make(tmp_path, ["a" * 50] * 6, "a", weight=3.0), make(tmp_path, ["b" * 50] * 6, "b", weight=1.0)]
    short = rows(build(entries, tmp_path / "cache", num_samples=40))
    long = rows(build(entries, tmp_path / "cache", num_samples=120))
    assert long[:40] == short
    assert abs(sum(ord("a") in row for row in long) - 90) <= 1
    assert "dataset_id" not in build(entries, tmp_path / "cache")[0]


def greedy(weights: list[float], num_samples: int) -> list[tuple[int, int]]:
    """Stream of each sample, and its number there: always the one farthest behind its share."""
    served, chosen = [0] * len(weights), []
    for i in range(num_samples):
        behind = [weight / sum(weights) * max(i, 1) - done for weight, done in zip(weights, served, strict=True)]
        stream = behind.index(max(behind))
        chosen.append((stream, served[stream]))
        served[stream] += 1
    return chosen


def test_the_index_of_a_blend_is_on_disk_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each rank of a long run would hold gigabytes of it."""
    weights = [3.0, 1.0, 0.0625]
    index = BlendIndex(weights, 100, tmp_path)
    assert [index[i] for i in range(100)] == greedy(weights, 100)
    assert index.num_samples == [sum(stream == k for stream, _ in greedy(weights, 100)) for k in range(3)]
    assert isinstance(index._streams, np.memmap)
    assert isinstance(index._numbers, np.memmap)
    monkeypatch.setattr(blended_module, "_make", lambda *_: pytest.fail("it is there"))
    assert [BlendIndex([6.0, 2.0, 0.125], 100, tmp_path)[i] for i in range(100)] == greedy(weights, 100)


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    num_samples=st.integers(1, 50),
    part=st.integers(1, 60),
)
def test_samples_of_each_stream_are_counted_from_the_end(weights: list[float], num_samples: int, part: int):
    chosen = np.array(greedy(weights, num_samples))
    counts = blended_module._counts(chosen[:, 0], chosen[:, 1], len(weights), part)
    assert counts.tolist() == np.bincount(chosen[:, 0], minlength=len(weights)).tolist()


@settings(max_examples=10, deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=6), num_samples=st.integers(1, 50))
def test_any_weights_give_enough_samples(
    weights: list[float], num_samples: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("weights")
    one = make(folder, ["text " * 7] * 3)
    dataset = build([DatasetEntry(one.path, weight) for weight in weights], folder / "cache", num_samples=num_samples)
    assert len(rows(dataset)) == num_samples


def test_data_prepared_anew_does_not_meet_the_old_index(tmp_path: Path):
    build([make(tmp_path, ["x" * 90] * 3)], tmp_path / "cache")
    entry = make(tmp_path, ["y" * 30] * 3, overwrite=True)
    assert all(set(row) <= {ord("y"), 256} for row in rows(build([entry], tmp_path / "cache")))


def test_leftovers_of_a_killed_writer_do_not_count_as_an_index(tmp_path: Path):
    entry = make(tmp_path, TEXTS)
    wanted = rows(build([entry], tmp_path / "cache"))
    (missing, *_) = sorted((tmp_path / "cache").iterdir())
    missing.rename(missing.with_name(f".{missing.name}.abc"))
    assert rows(build([entry], tmp_path / "cache")) == wanted


def _flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _save_as(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda path: np.save(path, change(np.load(path)))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped bit": _flip_last_bit,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "text": lambda path: path.write_text("x" * 500),
    "other dtype": _save_as(lambda array: array.astype(np.float64)),
    "other shape": _save_as(lambda array: array[:-1]),
    "header of a pickle": lambda path: path.write_bytes(path.read_bytes().replace(b"<i", b"|O")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_anew_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str):
    entries = [make(tmp_path, TEXTS, name="one"), make(tmp_path, TEXTS[:3], name="two")]
    cache = tmp_path / "cache"
    wanted = rows(build(entries, cache))
    files = {path: path.read_bytes() for path in sorted(cache.iterdir())}
    assert len(files) == 12
    assert capsys.readouterr().err == ""
    for path, content in files.items():
        if path.suffix == ".npy" or damage in ("flipped bit", "cut", "empty", "missing", "text"):
            DAMAGES[damage](path)
            assert rows(build(entries, cache)) == wanted
            told = capsys.readouterr().err
            assert f"{path} is " in told
            assert "is made anew" in told
        assert path.read_bytes() == content


def test_an_index_that_others_have_checked_is_opened_as_it_is(tmp_path: Path):
    made = list[list[Path]]()

    def write(paths: list[Path]) -> None:
        made.append(paths)
        np.save(paths[0], np.arange(5))

    for checked in (False, False, True):
        (array,) = open_index(tmp_path, "key", ["order"], write, "a test", checked=checked)
        assert array.tolist() == [0, 1, 2, 3, 4]
    assert len(made) == 1


def test_index_that_cannot_be_written_is_an_error(tmp_path: Path):
    entry = make(tmp_path, TEXTS)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="cannot be kept there"):
        build([entry], tmp_path / "file")


def test_sequence_longer_than_the_corpus(tmp_path: Path):
    entry = make(tmp_path, ["12345"], validation_fraction=0.0)
    with pytest.raises(
        DataError,
        match=r"data has 6 training tokens, and a sequence of 64 needs 65. Lower train.sequence_length to 5",
    ):
        build([entry], tmp_path / "cache", sequence_length=64)


def test_longest_sequence_that_a_corpus_has(tmp_path: Path):
    """The next token of its last one has to be there: one token more than the sequence."""
    entry = make(tmp_path, ["12345"], validation_fraction=0.0)
    # Five bytes and the end of the document.
    (sample,) = rows(build([entry], tmp_path / "cache", sequence_length=5, num_samples=1))
    assert len(sample) == 6
    with pytest.raises(DataError, match="data has 6 training tokens, and a sequence of 6 needs 7"):
        build([entry], tmp_path / "cache", sequence_length=6, num_samples=1)


@pytest.mark.parametrize("bad_id", [257, 65535])
def test_id_past_the_vocabulary_names_document_and_data_set(tmp_path: Path, bad_id: int):
    entry = make(tmp_path, ["x" * 9] * 6)
    path = Path(entry.path) / "train.bin"
    tokens = np.fromfile(path, dtype=np.uint16)
    tokens[23] = bad_id
    tokens.tofile(path)
    dataset = build([entry], tmp_path / "cache", sequence_length=4, num_samples=12)
    with pytest.raises(
        DataError, match=rf"data/train: document 2 holds token id {bad_id}, outside the vocabulary of 257"
    ):
        rows(dataset)


def test_manifest_with_an_id_past_the_vocabulary_does_not_open(tmp_path: Path):
    entry = make(tmp_path, TEXTS)
    path = Path(entry.path) / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"]["max_token_id"] = 300
    del manifest["digest"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="train holds token id 300, past the vocabulary of 257"):
        check_blend([entry])


def test_blends_that_cannot_work(tmp_path: Path):
    one = make(tmp_path, TEXTS, "one")
    bpe = train_bpe(TEXTS, 270, tmp_path / "t.json")
    two = make(tmp_path, TEXTS, "two", tokenizer=bpe)
    assert check_blend([one, one]).fingerprint == ByteTokenizer().fingerprint
    assert check_blend([two]).fingerprint == bpe.fingerprint
    with pytest.raises(DataError, match="different tokenizers"):
        check_blend([one, two])
    with pytest.raises(DataError, match="names no data"):
        check_blend([])
    with pytest.raises(DataError, match="no such data set"):
        check_blend([DatasetEntry(str(tmp_path / "none"))])


def build_on_rank(rank: int, port: int, entries: list[DatasetEntry], folder: Path, local_cache: bool) -> None:
    torch.set_num_threads(1)  # the parent may have had OpenMP threads, which a fork does not carry over
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dataset = build(entries, folder / (f"cache{rank}" if local_cache else "cache"), num_samples=50)
    (folder / f"rank{rank}.json").write_text(json.dumps(rows(dataset)))
    torch.distributed.barrier()  # the store is rank 0's
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("local_cache", [False, True])
def test_ranks_agree_with_shared_and_with_node_local_caches(tmp_path: Path, local_cache: bool):
    entries = [make(tmp_path, TEXTS, "a"), make(tmp_path, TEXTS[::-1], "b", weight=2.0)]
    arguments = (free_ports(), entries, tmp_path, local_cache)
    torch.multiprocessing.start_processes(build_on_rank, arguments, nprocs=2, start_method="fork")
    alone = rows(build(entries, tmp_path / "alone", num_samples=50))
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)] == [alone, alone]
