"""Tokens that the ranks of a cut sequence ask each other for, against Megatron's own cutting of a sequence of numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.layout import halo_requests, halo_tokens_returned, halo_tokens_sent, stretches


def held(tensor: int, context: int, num_tokens: int) -> list[list[int]]:
    """Places that each rank holds, tensor-parallel ranks fastest: slices r and 2 CP - 1 - r, cut in equal parts."""
    length = num_tokens * tensor * context
    found = []
    for rank in range(context):
        slices = torch.arange(length).chunk(2 * context)
        own = torch.cat((slices[rank], slices[2 * context - 1 - rank])) if context > 1 else torch.arange(length)
        found += [part.tolist() for part in own.chunk(tensor)]
    return found


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (4, 1), (1, 3), (2, 2), (3, 2), (4, 4)])
def test_every_stretch_gets_the_tokens_before_it(tensor: int, context: int, width: int) -> None:
    sizes: dict[str, Any] = {"tensor": tensor, "context": context}
    places, num_tokens = held(tensor, context, 4), 4
    sent, returned = [0] * len(places), [0] * len(places)
    for rank, own in enumerate(places):
        parts = stretches(rank, num_tokens, **sizes)
        assert [place for part in parts for place in range(part.start, part.stop)] == own
        for part, asked in zip(parts, halo_requests(rank, num_tokens, width, **sizes), strict=True):
            got = {place: places[owner][at] for owner, at, place in asked}
            assert got == {
                place: part.start - width + place for place in range(width) if part.start - width + place >= 0
            }
            for owner, _, _ in asked:
                sent[owner] += owner != rank
                returned[rank] += owner != rank
    assert [halo_tokens_sent(rank, num_tokens, width, **sizes) for rank in range(len(places))] == sent
    assert [halo_tokens_returned(rank, num_tokens, width, **sizes) for rank in range(len(places))] == returned
