"""The host memory of asynchronous saves: items in chunks, whose sizes no allocator rounds up far, used again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from pretrain.checkpoint import staging
from pretrain.checkpoint.staging import StagingBuffer, placed
from pretrain.checkpoint.store.tensors import Region
from pretrain.planning.bytes import memory
from pretrain.planning.bytes.memory import page_locked

GB = 1 << 30


def items(*sizes: int) -> dict[Region, Tensor]:
    return {Region(f"t{n}", (0,), (size,)): torch.arange(size) % 251 for n, size in enumerate(sizes)}


def test_items_of_64_mb_fill_their_chunks() -> None:
    """The 22.5 GB that a rank of 64 writes of the 120B model are 21 chunks, where one allocation would be 32 GiB."""
    sizes = [64 << 20] * (22_500_000_000 >> 26)
    _, used = placed(sizes)
    assert used[:-1] == [GB] * 20
    assert sum(used) == sum(sizes)
    assert page_locked(sum(sizes)) == 21 * GB


def test_places_do_not_overlap_and_gaps_are_small() -> None:
    draw = random.Random(1)
    sizes = [draw.choice([0, 100, draw.randrange(1, 1 << 26), 67_108_800]) for _ in range(2000)]
    places, used = placed(sizes)
    by_chunk: dict[int, int] = {}
    for place, size in zip(places, sizes, strict=True):
        assert place.start % 64 == 0
        assert place.start >= by_chunk.get(place.chunk, 0)
        by_chunk[place.chunk] = place.start + size
        assert by_chunk[place.chunk] <= used[place.chunk] <= GB
    assert sum(sizes) > 0.95 * GB * (len(used) - 1)


def test_copies_are_the_items_and_chunks_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1024)
    buffer = StagingBuffer()
    # The second is larger than a chunk.
    for sizes in ((100, 300, 10, 0, 20), (90, 200, 20), (100, 300, 10, 1, 20)):
        data = items(*sizes)
        copies = buffer.copy(data)
        for tensor in data.values():
            tensor.zero_()
        for region, tensor in items(*sizes).items():
            assert torch.equal(copies[region], tensor)
        if sizes[0] == 100:
            addresses = {copy.untyped_storage().data_ptr() for copy in copies.values()}
            assert buffer.num_bytes == 1024 + 4096 + 256
            assert len(addresses) == 3
        else:
            # The third is given back, and what is too large is kept.
            assert buffer.num_bytes == 1024 + 4096


def test_plans_count_the_same_chunks() -> None:
    assert memory.CHUNK_BYTES == staging.CHUNK_BYTES
    for num_bytes in (0, 64, 5_000_000, GB - 64, GB, GB + 64, 7 * GB + 3_000_000):
        sizes = [*[1 << 26] * (num_bytes >> 26), num_bytes % (1 << 26)]
        _, used = placed(size for size in sizes if size)
        assert page_locked(num_bytes) == sum(1 << (size - 1).bit_length() for size in used)
