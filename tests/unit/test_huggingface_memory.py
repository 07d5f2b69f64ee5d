"""The parts of the exported memory code, against what they stand for in training."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kernels.list_topk import naive
from kernels.rms_norm.op import torch_rms_norm
from megamem.banks.shuffle import KeyedShuffle
from megamem.token_tables.codec import QuantisedRows

pytest.importorskip("transformers", reason="the exported code imports it: pip install '.[hf]'")

from pretrain.convert.huggingface.remote_code import memory_megamem

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
@pytest.mark.parametrize(
    "scores",
    [
        [[3.0, 1, 3, 2, 3, 0, 1, 2]],
        [[0.0, -0.0, 0.0, -1, 1, 1, -1, 5]],
        [[NAN, 1, 2, NAN, 3, 4, 5, 6], [8.0, 7, 6, 5, 4, 3, 2, 1]],
        [[NAN, 1, 2, 9, 3, 4, 5, 6]],
        [[INFINITY, 1, -INFINITY, INFINITY, 3, -INFINITY, 5, 6]],
        [[2.0] * 8],
    ],
)
def test_the_order_of_retrieval_is_that_of_training(scores: list[list[float]], top_k: int) -> None:
    lists = torch.tensor(scores)
    assert torch.equal(memory_megamem.list_topk(lists, top_k), naive.list_topk(lists, top_k))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [6, 7, 1])
def test_codes_are_decoded_as_in_training_however_many_rows_are_read(width: int, bits: int) -> None:
    """One row alone keeps the stride of its table, which is no multiple of the scale's 4 bytes."""
    table = torch.randn(5, width, generator=torch.Generator().manual_seed(2))
    codec = QuantisedRows(width, torch.float32, bits)
    records = codec.encode(0, table)
    whole = codec.decode(torch.arange(5), records)
    for rows in (slice(0, 5), slice(2, 4), slice(3, 4), slice(2, 2)):
        assert torch.equal(memory_megamem.decoded(records[rows], width, bits), whole[rows])
        assert torch.equal(codec.decode(torch.arange(5)[rows], records[rows]), whole[rows])


def test_random_lists_and_lists_with_many_equal_scores() -> None:
    generator = torch.Generator().manual_seed(1)
    for lists in (torch.randn(50, 40, generator=generator), torch.randint(0, 9, (50, 40), generator=generator).float()):
        for top_k in (1, 7, 39, 40):
            assert torch.equal(memory_megamem.list_topk(lists, top_k), naive.list_topk(lists, top_k))


@pytest.mark.parametrize("num_scores", [3, 1000], ids=["equal scores", "different scores"])
def test_the_best_of_a_list_do_not_keep_the_whole_list(num_scores: int) -> None:
    lists = torch.arange(1000).remainder(num_scores).float().repeat(4, 1)
    best = memory_megamem.list_topk(lists, 16)
    assert best.untyped_storage().nbytes() == 4 * 16 * 8


@pytest.mark.parametrize("num_keys", [2, 7, 96])
def test_the_shuffle_is_that_of_training(num_keys: int) -> None:
    ours = KeyedShuffle(num_keys, seed=3, name="decoder.layers.0.mlp.memory")
    theirs = memory_megamem.Shuffle(num_keys, list(ours.round_keys))
    entries = torch.arange(num_keys**2)
    assert torch.equal(theirs(entries), ours(entries))
    assert not torch.equal(theirs(entries), entries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_round_as_in_training(dtype: torch.dtype) -> None:
    x, gain = torch.randn(5, 16).to(dtype), torch.rand(16).to(dtype)
    assert torch.equal(memory_megamem.rms_normalise(x, gain, 1e-5), torch_rms_norm(x, gain, 1e-5))


@pytest.mark.parametrize("num_places", [1, 40])
def test_rows_that_are_read_often_are_kept_and_are_those_of_the_table(num_places: int) -> None:
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(5000, 3, generator=generator)
    weights = 1 / torch.arange(1, 5001).double()
    hot, fetched, asked = memory_megamem.HotRows(num_places, 3, table), 0, 0

    def fetch(rows: torch.Tensor) -> torch.Tensor:
        nonlocal fetched
        fetched += len(rows)
        return table[rows]

    for _ in range(400):
        rows = torch.multinomial(weights, 8, generator=generator)
        assert torch.equal(hot.read(rows, fetch), table[rows])
        asked += len(rows)
    assert (hot.num_read, hot.num_found) == (asked, asked - fetched)
    # The 40 rows that are read most would be found in so many; each has one place, which another may have.
    best = float(weights[:num_places].sum() / weights.sum())
    assert num_places == 1 or 0.6 * best < hot.num_found / asked < best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mapped_tensor_is_that_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: torch.randn(rows, 3).to(dtype) for name, rows in (("a", 5), ("b", 2000), ("c", 1))}
    save_file(tensors, tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        found = memory_megamem.mapped_tensor(str(tmp_path / "x.safetensors"), name, tuple(tensor.shape))
        assert found.dtype == dtype
        assert torch.equal(found, tensor)


def test_what_is_written_to_a_mapped_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2000, 3)}, path)
    before = path.read_bytes()
    memory_megamem.mapped_tensor(str(path), "a", (2000, 3)).zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("gone", "model.banks.0.values is not there as it should be"),
        ("integers", "model.banks.0.values is not there as it should be"),
        ("halved", r"model.banks.0.values is \[50, 3\] .* and the configuration has \[100, 3\]"),
        ("turned", r"model.banks.0.values is \[3, 100\]"),
        ("cut", r"of 1192, and the configuration has \[100, 3\]"),
    ],
)
def test_a_mapped_table_is_held_against_the_configuration(tmp_path: Path, damage: str, told: str) -> None:
    name, rows = "model.banks.0.values", torch.randn(100, 3)
    changed = {
        "gone": {"other": rows},
        "integers": {name: rows.int()},
        "halved": {name: rows[:50]},
        "turned": {name: rows.T.contiguous()},
    }
    path = tmp_path / "x.safetensors"
    save_file(changed.get(damage, {name: rows}), path)
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(ValueError, match=told):
        memory_megamem.mapped_tensor(str(path), name, (100, 3))
