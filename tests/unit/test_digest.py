"""The hash by which replicas are compared."""

from __future__ import annotations

import struct

import pytest
import torch

import pretrain.train.health.replicas as replicas
from pretrain.train.health.replicas import ReplicaDifference, describe_differences, digest


@pytest.mark.parametrize("part", [5, 1 << 22])
def test_it_is_a_weighted_sum_of_bit_patterns(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PART_ELEMENTS", part)
    values = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)).tolist()
    bits = [struct.unpack("<i", struct.pack("<f", value))[0] for row in values for value in row]
    expected = sum(number * (2 * index + 1) for index, number in enumerate(bits)) % 2**64
    assert digest(torch.tensor(values)).item() % 2**64 == expected


def test_rows_that_lie_apart_are_hashed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(23, 6, generator=torch.Generator().manual_seed(2)).bfloat16()
    apart = torch.zeros(23, 9, dtype=torch.bfloat16)[:, :6].copy_(rows)
    for part in (5, 20, 1 << 22):
        monkeypatch.setattr(replicas, "PART_ELEMENTS", part)
        assert digest(apart) == digest(rows)


def test_any_bit_and_any_two_places_count() -> None:
    for dtype, integer in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        tensor = torch.arange(40.0).to(dtype)
        before = digest(tensor)
        for index in (0, 17, 39):
            for bit in range(8 * tensor.element_size() - 1):
                tensor.view(integer)[index] ^= 1 << bit
                assert digest(tensor) != before
                tensor.view(integer)[index] ^= 1 << bit
        assert digest(tensor) == before
        tensor[[3, 4]] = tensor[[4, 3]]
        assert digest(tensor) != before


def test_the_ranks_in_the_minority_are_named() -> None:
    def said(*digests: int) -> tuple[ReplicaDifference, ...]:
        ranks = tuple(range(len(digests)))
        return tuple(ReplicaDifference(ranks, "w", rank, f"node{rank}", of) for rank, of in enumerate(digests))

    assert describe_differences(said(7, 7, 8, 7)) == "w on rank 2 (node2), of the replicas on ranks 0, 1, 2, 3"
    # Nobody knows which of two is wrong.
    assert describe_differences(said(7, 8)) == "w on rank 0 (node0), 1 (node1), of the replicas on ranks 0, 1"
