"""The counter-based generator: a shard holds the numbers of its part of the whole, and they are what they claim to be."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.common.hashing import mix
from megamem.banks.hashing import key_of
from megamem.initialisation import random_fill
from megamem.initialisation.distributions import Normal, Uniform
from megamem.initialisation.random_fill import fill, normal_rows


def normal(shape: tuple[int, ...], *, seed: int = 1, name: str = "w", dtype: torch.dtype = torch.float64) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    fill(out, Normal(1.0), seed=seed, name=name, global_shape=shape, offset=(0,) * len(shape))
    return out


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    """A shape, and for every dimension the sizes of its parts."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    parts = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
        edges = [0, *cuts, size]
        parts.append([b - a for a, b in itertools.pairwise(edges)])
    return shape, parts


def slices(parts: list[list[int]]) -> list[tuple[slice, ...]]:
    result: list[tuple[slice, ...]] = [()]
    for sizes in parts:
        edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        result = [(*head, slice(a, b)) for head in result for a, b in itertools.pairwise(edges)]
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(split=splits(), seed=st.integers(0, 2**40))
def test_shards_are_slices_of_the_whole(
    dtype: torch.dtype, split: tuple[tuple[int, ...], list[list[int]]], seed: int
) -> None:
    shape, parts = split
    for distribution in (Normal(0.3), Uniform(2.0)):
        whole = torch.empty(shape, dtype=dtype)
        fill(whole, distribution, seed=seed, name="w")
        for where in slices(parts):
            shard = torch.full_like(whole[where], float("nan")).contiguous()
            fill(shard, distribution, seed=seed, name="w", global_shape=shape, offset=[s.start for s in where])
            assert torch.equal(shard, whole[where])


def test_the_fill_writes_into_views() -> None:
    """A checkpoint entry may be a part of a parameter, such as the gate of a fused weight."""
    base = torch.zeros(6, 8)
    fill(base[2:4, 1:5], Normal(1.0), seed=1, name="w", global_shape=(2, 4), offset=(0, 0))
    assert torch.equal(base[2:4, 1:5], normal((2, 4), dtype=torch.float32))
    base[2:4, 1:5] = 0
    assert not base.any()


def test_numbers_do_not_depend_on_the_chunk_of_the_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, rows = normal((37, 5, 3)), torch.tensor([30, 2, 2, 36])
    columns = torch.empty(37, 2, 3, dtype=torch.float64)
    monkeypatch.setattr(random_fill, "_TEMPORARY_ELEMENTS", {"cpu": 40})
    assert torch.equal(normal((37, 5, 3)), whole)
    fill(columns, Normal(1.0), seed=1, name="w", global_shape=(37, 5, 3), offset=(0, 3, 0))
    assert torch.equal(columns, whole[:, 3:])
    drawn = normal_rows(rows, seed=1, name="w", std=1.0, width=15)
    assert torch.equal(drawn, whole.flatten(1)[rows].float())


def test_threads_fill_what_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one core, and PyTorch's own threads are as many afterwards, also where a part fails."""
    before, threads = torch.get_num_threads(), {}
    whole = normal((400, 3))

    def watch(counter: Tensor, key: int) -> Tensor:
        threads[threading.get_ident()] = torch.get_num_threads()
        if key == failing:
            raise MemoryError
        return mix(counter, key)

    failing = -1
    monkeypatch.setattr(random_fill, "_TEMPORARY_ELEMENTS", {"cpu": 12})
    monkeypatch.setattr(random_fill, "mix", watch)
    torch.set_num_threads(3)
    try:
        assert torch.equal(normal((400, 3)), whole)
        assert threading.get_ident() not in threads
        assert set(threads.values()) == {1}
        assert torch.get_num_threads() == 3
        failing = key_of(1, "w")
        with pytest.raises(MemoryError):
            normal((400, 3))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_temporaries_are_bounded_whatever_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of one head are a single row of their tensor."""
    sizes = []

    def count(counter: Tensor, key: int) -> Tensor:
        sizes.append(counter.numel())
        return mix(counter, key)

    monkeypatch.setattr(random_fill, "_TEMPORARY_ELEMENTS", {"cpu": 40})
    monkeypatch.setattr(random_fill, "mix", count)
    normal((1, 2, 50, 3))
    assert max(sizes) <= 40
    assert sum(sizes) == 300


def test_normal_moments() -> None:
    x = normal((1000, 1000))
    n = x.numel()
    assert abs(float(x.mean())) < 5 / math.sqrt(n)
    assert abs(float(x.var()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((x**3).mean())) < 5 * math.sqrt(15 / n)
    assert abs(float((x**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    for bound, probability in ((1, 0.3173105), (2, 0.0455003), (3, 0.0026998), (4, 0.0000633)):
        found = int((x.abs() > bound).sum())
        assert abs(found - n * probability) < 5 * math.sqrt(n * probability)


def test_uniform_moments_and_bounds() -> None:
    x = torch.empty(1000, 1000, dtype=torch.float64)
    fill(x, Uniform(3.0), seed=1, name="w", global_shape=x.shape, offset=(0, 0))
    n = x.numel()
    assert float(x.min()) > 0
    assert float(x.max()) < 3
    assert abs(float(x.mean()) - 1.5) < 5 * math.sqrt(0.75 / n)
    counts = torch.histc(x, bins=20, min=0, max=3)
    chi_squared = float(((counts - n / 20) ** 2 / (n / 20)).sum())
    # The 99.99 % quantile of 19 degrees of freedom.
    assert chi_squared < 50.8


def test_neighbours_names_and_seeds_are_uncorrelated() -> None:
    x = normal((500, 500))
    limit = 5 / math.sqrt(x.numel())
    others = {
        "right": (x[:, :-1], x[:, 1:]),
        "below": (x[:-1], x[1:]),
        "name": (x, normal((500, 500), name="v")),
        "seed": (x, normal((500, 500), seed=2)),
    }
    for name, (a, b) in others.items():
        correlation = float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])
        assert abs(correlation) < limit, name


def test_std_scales() -> None:
    out = torch.empty(4, 5, dtype=torch.float64)
    fill(out, Normal(0.25), seed=1, name="w", global_shape=(4, 5), offset=(0, 0))
    assert torch.equal(out, normal((4, 5)) * 0.25)
