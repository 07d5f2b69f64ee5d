"""Documents within sequences: positions, bounds, and the scores that attention has."""

from __future__ import annotations

import itertools

import pytest
import torch

from megamem.attention.documents import Documents, Slice, document_bounds, document_positions

LENGTH, SEQUENCES, SLICES = 24, 3, 8
STARTS = ((0,), (0, 1, 3, 4, 20), (0, 6, 12, 23))


def test_positions_count_from_the_last_end_of_a_document() -> None:
    ids = torch.tensor([[5, 5, 9, 5, 5, 5, 9, 9], [9, 5, 5, 5, 5, 5, 5, 9]])
    assert document_positions(ids, eod=9).tolist() == [[0, 1, 0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 4, 5, 6, 0]]


def test_bounds_are_cumulative_lengths_in_host_memory() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 0, 0], [3, 4, 5, 6, 7, 8, 9, 0]])
    bounds = document_bounds(positions)
    assert bounds.tolist() == [0, 2, 6, 7, 8, 15, 16]
    assert (bounds.dtype, bounds.device.type) == (torch.int64, "cpu")
    # Positions are left alone, also where a sequence does not begin with a document.
    assert positions[1, 0] == 3


def are_seen(query: int, key: int, starts: tuple[int, ...]) -> bool:
    return key <= query and not any(key < start <= query for start in starts)


@pytest.mark.parametrize("separate", [False, True])
def test_tiles_are_the_scores_that_there_are_each_once(separate: bool) -> None:
    """Tiles lie between every two of eight slices, which a tensor has in another order than the sequence."""
    bounds = [sequence * LENGTH + start for sequence, starts in enumerate(STARTS) for start in starts]
    documents = Documents.of(torch.tensor([*bounds, SEQUENCES * LENGTH]) if separate else None, LENGTH)
    size = LENGTH // SLICES
    order = (3, 0, 7, 1, 6, 2, 5, 4)
    slices = [Slice(n * size, (n + 1) * size, offset=order.index(n) * size) for n in range(SLICES)]
    tokens = [n * size + i for n in order for i in range(size)]
    counted = torch.zeros(SEQUENCES, LENGTH, LENGTH, dtype=torch.int64)
    for queries, keys in itertools.product(slices, slices):
        for tile in documents.tiles(queries, keys):
            for q, k in itertools.product(tokens[tile.queries], tokens[tile.keys]):
                if not tile.causal or k <= q:
                    counted[tile.sequences, q, k] += 1
            if tile.causal:
                assert tile.queries == tile.keys
    expected = [
        [[int(are_seen(q, k, starts if separate else (0,))) for k in range(LENGTH)] for q in range(LENGTH)]
        for starts in STARTS
    ]
    assert counted.tolist() == expected


def test_no_keys_make_no_tile() -> None:
    assert list(Documents(LENGTH, None).tiles(Slice(0, 4), Slice(0, 0))) == []
