"""Host memory that a rank's part of a checkpoint is copied into, so that training can go on while it is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.checkpoint.store.tensors import Region

CHUNK_BYTES = 1 << 30
"""Host memory that is allocated at a time: `pretrain.planning.bytes.memory` has the same.

PyTorch rounds page-locked allocations up to powers of two: one of 22.5 GB would take 32. Sixteen of the largest items
fit into a chunk, so that a gap behind the last of them is small."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class StagedBytes:
    """Bytes of a chunk, from `start` on."""

    chunk: int
    start: int


class StagingBuffer:
    """Chunks as large together as the rank's part, allocated at the first save and used again by the later ones.

    Page-locked where there is a GPU to copy from.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Host memory that is held."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def copy(self, data: Mapping[Region, Tensor]) -> dict[Region, Tensor]:
        """Copies of all items in the buffer, complete when this returns; its previous contents are overwritten."""
        places, used = placed(tensor.nbytes for tensor in data.values())
        on_gpu = any(tensor.is_cuda for tensor in data.values())
        self._allocate(used, pinned=on_gpu)
        copies = {}
        for (region, tensor), place in zip(data.items(), places, strict=True):
            flat = self._chunks[place.chunk][place.start : place.start + tensor.nbytes]
            copies[region] = flat.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
        if on_gpu:
            # Host sync: the next step overwrites what is being copied.
            torch.cuda.synchronize()
        return copies

    def _allocate(self, used: list[int], *, pinned: bool) -> None:
        """Have a chunk for each of these numbers of bytes, none of which outgrows a chunk that is kept."""
        del self._chunks[len(used) :]
        for number, needed in enumerate(used):
            if number < len(self._chunks) and self._chunks[number].nbytes >= needed:
                continue
            # Free what it replaces first.
            del self._chunks[number:]
            size = 1 << (needed - 1).bit_length()
            self._chunks.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned))


def placed(sizes: Iterable[int]) -> tuple[list[StagedBytes], list[int]]:
    """Places of items of so many bytes, each in the first chunk that has room for it, and the bytes used of each chunk.

    An item that is larger than a chunk has one of its own.
    """
    places: list[StagedBytes] = []
    used: list[int] = []
    for size in sizes:
        chunk = next((number for number, start in enumerate(used) if start + size <= CHUNK_BYTES), len(used))
        if chunk == len(used):
            used.append(0)
        places.append(StagedBytes(chunk, used[chunk]))
        used[chunk] += -(-max(1, size) // _ALIGNMENT) * _ALIGNMENT
    return places, used
