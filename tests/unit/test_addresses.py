"""Addresses by n-grams against recorded ones of public codes, to the bit, and against definitions of a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from kernels.select import select_kernels
from megamem.addresses.hashed import HashedNgrams
from megamem.addresses.ngrams import NgramAddressConfig
from megamem.addresses.primes import is_prime, largest_prime
from megamem.addresses.signs import sign_patterns
from megamem.chunk.halo import UNCUT

CPU = torch.device("cpu")
PUBLISHED = {
    "nanochat_854": NgramAddressConfig(max_order=3, heads_per_order=2, num_rows=300_000_000),
    "nanogpt_366": NgramAddressConfig(max_order=3, heads_per_order=2, num_rows=80_000_000),
    "nanogpt_201": NgramAddressConfig(rules="xor", num_rows=251_520),
    "nanogpt_299": NgramAddressConfig(rules="xor", num_rows=754_560),
    "longcat_flash_lite": NgramAddressConfig(
        rules="polynomial", max_order=4, heads_per_order=4, num_rows=78 * 131072, base=131072, boundary_id=2
    ),
    "longcat_2": NgramAddressConfig(
        rules="polynomial", max_order=5, heads_per_order=4, num_rows=16476897, base=163840, boundary_id=2
    ),
    "mome_bigrams": NgramAddressConfig(rules="xor", num_rows=196_608),
}
SIGNS = {
    "nanogpt_299_signs": (NgramAddressConfig(rules="xor", signs="ids"), 0),
    "nanogpt_360_signs2": (NgramAddressConfig(rules="xor", max_order=3, signs="hashed"), 0),
    "nanogpt_360_signs3": (NgramAddressConfig(rules="xor", max_order=3, signs="hashed"), 1),
}
"""Patterns of signs, and the order that they are of, from bigrams on."""


def positions_in(documents: Tensor) -> Tensor:
    """[b, s] places in documents of `documents` [b, s], their numbers."""
    places = torch.zeros_like(documents)
    for place in range(1, documents.shape[1]):
        goes_on = documents[:, place] == documents[:, place - 1]
        places[:, place] = torch.where(goes_on, places[:, place - 1] + 1, 0)
    return places


def addresses_of(config: NgramAddressConfig, ids: Tensor, positions: Tensor) -> Tensor:
    """[b, s, A] of ids and positions [b, s]."""
    hashed = HashedNgrams(config, CPU, select_kernels(device_type="cpu").ngram_hashes)
    found: Tensor = hashed(ids.T, positions.T, UNCUT)
    return found.permute(2, 1, 0)


def record_of(golden_dir: Path, name: str, documents: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [b, s] of a rule's record, their positions, and what it made of them with documents "crossed" or "isolated"."""
    tensors = load_file(golden_dir / "ngram" / "published_addresses.safetensors")
    ids, wanted = tensors[f"{name}.tokens"], tensors[f"{name}.{documents}"]
    places = torch.arange(ids.shape[1]).expand_as(ids)
    if documents == "isolated":
        places = positions_in(tensors[f"{name}.documents"])
        assert bool((places == 0).sum() > len(places))
    return ids, places, wanted


@pytest.mark.parametrize("documents", ["crossed", "isolated"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_addresses_are_those_of_public_codes(golden_dir: Path, name: str, documents: str) -> None:
    ids, places, wanted = record_of(golden_dir, name, documents)
    found = addresses_of(PUBLISHED[name], ids, places)
    if name.startswith("longcat"):
        # Sub-tables there are ranges of rows here.
        found = found - torch.tensor(PUBLISHED[name].hashes.offsets)
    assert torch.equal(found, wanted.view_as(found))


def test_every_recorded_rule_is_tested(golden_dir: Path) -> None:
    recorded = json.loads((golden_dir / "ngram" / "published_addresses.json").read_text(encoding="utf-8"))["rules"]
    assert set(recorded) == {*PUBLISHED, *SIGNS}


@pytest.mark.parametrize("documents", ["crossed", "isolated"])
@pytest.mark.parametrize("name", SIGNS)
def test_signs_are_chosen_as_in_public_codes(golden_dir: Path, name: str, documents: str) -> None:
    ids, places, wanted = record_of(golden_dir, name, documents)
    config, order = SIGNS[name]
    found = addresses_of(config, ids, places)[..., config.num_addresses + order]
    assert torch.equal(found, wanted.view_as(found))


@pytest.mark.parametrize(("num_patterns", "width"), [(1, 1), (16, 7), (300, 64)])
def test_signs_are_even_and_patterns_differ(num_patterns: int, width: int) -> None:
    patterns = sign_patterns(num_patterns, width, CPU)
    assert patterns.shape == (num_patterns, width)
    assert patterns.dtype == torch.int8
    assert bool((patterns.abs() == 1).all())
    # As many as coins fall within five deviations.
    assert abs(int(patterns.sum())) <= 5 * (num_patterns * width) ** 0.5
    if width > 30:
        assert len(patterns.unique(dim=0)) == num_patterns


def test_rows_are_as_many_as_are_recorded(golden_dir: Path) -> None:
    recorded = json.loads((golden_dir / "ngram" / "published_addresses.json").read_text(encoding="utf-8"))["rules"]
    for name, each in PUBLISHED.items():
        tables = recorded[name].get("tables", [recorded[name]])
        assert each.num_hashed_rows == sum(table["rows"] for table in tables)


SUM_OF_TWO = [[1000003 + 2654435761, 998244353 + 40503], [1000003 + 7920 * 2654435761, 998244353 + 7920 * 40503]]
SUM_OF_THREE = [1000003 + 98 * 2654435761, 998244353 + 98 * 40503, 911382323 + 98 * 40503]


@given(
    ids=st.lists(st.integers(0, 200_000), min_size=1, max_size=7),
    num_rows=st.integers(3, 1 << 36),
    start=st.integers(0, 6),
)
def test_sums_of_wide_ids_do_not_overflow(ids: list[int], num_rows: int, start: int) -> None:
    """Python's integers have no width; a document begins inside of the text."""
    config = NgramAddressConfig(max_order=2, heads_per_order=2, num_rows=num_rows)
    places = [place if place < start else place - start for place in range(len(ids))]
    found = addresses_of(config, torch.tensor([ids]), torch.tensor([places]))[0]
    for place, of_token in enumerate(found.tolist()):
        before = ids[place - 1] if places[place] else 0
        wanted = [(ids[place] * own + before * other) % largest_prime(num_rows) for own, other in SUM_OF_TWO]
        assert of_token == wanted


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=6))
def test_orders_of_xor_have_rows_of_their_own(ids: list[int]) -> None:
    """Bigrams first; what a text's start cuts has the last row of its order."""
    config = NgramAddressConfig(rules="xor", max_order=3, num_rows=101)
    found = addresses_of(config, torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0))[0].tolist()
    for place, (pair, triple) in enumerate(found):
        c0, c1, c2 = (ids[place - lag] if place >= lag else None for lag in range(3))
        assert c0 is not None
        assert pair == (100 if c1 is None else (36313 * c0 ^ 27191 * c1) % 100)
        assert triple == 101 + (100 if c1 is None or c2 is None else (36313 * c0 ^ 27191 * c1 ^ 51647 * c2) % 100)
    assert config.num_hashed_rows == 202


def test_trigrams_have_salts_of_their_own() -> None:
    config = NgramAddressConfig(max_order=3, num_rows=1 << 30)
    found = addresses_of(config, torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]]))
    prime = largest_prime(1 << 30)
    assert found[0, 2].tolist() == [
        sum(id * factor for id, factor in zip((7, 6), SUM_OF_TWO[0], strict=True)) % prime,
        sum(id * factor for id, factor in zip((7, 6, 5), SUM_OF_THREE, strict=True)) % prime,
    ]


@pytest.mark.parametrize(("limit", "prime"), [(2, 2), (3, 3), (4, 3), (100, 97), (300_000_000, 299_999_977)])
def test_largest_prime(limit: int, prime: int) -> None:
    assert largest_prime(limit) == prime
    assert is_prime(prime)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rules": "xor", "max_order": 4}, "rules xor have multipliers of up to 3 tokens: set max_order: 3"),
        ({"max_order": 5}, "rules sum have multipliers of up to 4 tokens: set max_order: 4"),
        ({"max_order": 6}, "n-grams have 2 to 5 tokens"),
        ({"max_order": 4, "signs": "hashed"}, "signs hashed have multipliers of bigrams and trigrams alone"),
        ({"num_rows": 2}, "num_rows is 2"),
    ],
)
def test_what_has_no_address_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramAddressConfig(**values)
