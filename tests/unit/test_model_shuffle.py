"""Shuffles are bijections that leave nothing of the grid's rows and columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.common.hashing import mix
from megamem.banks.hashing import key_of
from megamem.banks.shuffle import KeyedShuffle, random_permutation

names = st.text(min_size=1, max_size=20)
seeds = st.integers(0, 2**63)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(num_keys=st.integers(1, 90), seed=seeds, name=names)
@example(num_keys=1, seed=0, name="a")
@example(num_keys=2, seed=0, name="a")
def test_keyed_shuffle_is_a_bijection(num_keys: int, seed: int, name: str) -> None:
    entries = torch.arange(num_keys**2)
    shuffled = KeyedShuffle(num_keys, seed=seed, name=name)(entries)
    assert torch.equal(shuffled.sort().values, entries)


def test_keyed_shuffle_is_a_bijection_of_a_grid_of_the_papers_size() -> None:
    entries = torch.arange(1138**2)
    assert torch.equal(KeyedShuffle(1138, seed=1, name="layer")(entries).sort().values, entries)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(num_keys=st.integers(2**16, 2**31 - 1), seed=seeds)
def test_keyed_shuffle_of_a_huge_grid_stays_in_range_and_apart(num_keys: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(0)
    entries = torch.randint(0, num_keys**2, (10_000,), generator=generator).unique()
    shuffled = KeyedShuffle(num_keys, seed=seed, name="layer")(entries)
    assert int(shuffled.min()) >= 0
    assert int(shuffled.max()) < num_keys**2
    assert len(shuffled.unique()) == len(entries)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(num_entries=st.integers(1, 5000), seed=seeds, name=names)
def test_random_permutation_is_one(num_entries: int, seed: int, name: str) -> None:
    permutation = random_permutation(num_entries, seed=seed, name=name)
    assert torch.equal(permutation.sort().values, torch.arange(num_entries))
    assert torch.equal(permutation, random_permutation(num_entries, seed=seed, name=name))


def keyed(num_keys: int, seed: int, name: str) -> Tensor:
    return KeyedShuffle(num_keys, seed=seed, name=name)(torch.arange(num_keys**2))


def stored(num_keys: int, seed: int, name: str) -> Tensor:
    return random_permutation(num_keys**2, seed=seed, name=name)


SHUFFLES = [pytest.param(keyed, id="keyed"), pytest.param(stored, id="stored")]
Shuffle = Callable[[int, int, str], Tensor]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_shuffles_depend_on_seed_and_name_alone(shuffle: Shuffle) -> None:
    base = shuffle(32, 1, "decoder.layers.0.mlp.memory")
    assert torch.equal(base, shuffle(32, 1, "decoder.layers.0.mlp.memory"))
    for other in (shuffle(32, 2, "decoder.layers.0.mlp.memory"), shuffle(32, 1, "decoder.layers.1.mlp.memory")):
        # Two random permutations of 1024 entries have one fixed point in common on average.
        assert int((base == other).sum()) < 8
    assert int((base == torch.arange(1024)).sum()) < 8


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("num_keys", [16, 61, 128])
@pytest.mark.parametrize("side", ["row", "column"])
def test_neighbours_are_torn_apart(shuffle: Shuffle, num_keys: int, side: str) -> None:
    """Entries of one row (or column) meet again in a row or a column as often as any two entries do: with probability
    about 1/N each.
    """
    met_in_row, met_in_column, pairs = 0, 0, 0
    for seed in range(4):
        grid = shuffle(num_keys, seed, "layer").view(num_keys, num_keys)
        lines = grid if side == "row" else grid.t()
        first, second = torch.combinations(torch.arange(num_keys)).unbind(1)
        a, b = lines[:, first], lines[:, second]
        met_in_row += int((a // num_keys == b // num_keys).sum())
        met_in_column += int((a % num_keys == b % num_keys).sum())
        pairs += a.numel()
    expected = pairs / (num_keys + 1)
    assert met_in_row == pytest.approx(expected, rel=0.25)
    assert met_in_column == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_every_row_scatters_over_the_whole_table(shuffle: Shuffle) -> None:
    num_keys = 64
    where = shuffle(num_keys, 3, "layer").view(num_keys, num_keys).double() / num_keys**2
    # The mean of 64 uniform numbers has a standard deviation of 0.036.
    assert float((where.mean(1) - 0.5).abs().max()) < 5 * 0.036
    assert float((where.mean(0) - 0.5).abs().max()) < 5 * 0.036


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator, seeded with 1234567."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    actual = mix(torch.arange(5), 1234567).tolist()
    assert [value % 2**64 for value in actual] == expected


def test_keys_differ_by_every_part() -> None:
    keys = {key_of(1, "a", "b"), key_of(2, "a", "b"), key_of(1, "ab"), key_of(1, "a"), key_of(1, "b", "a")}
    assert len(keys) == 5
    assert all(0 <= key < 2**63 for key in keys)
