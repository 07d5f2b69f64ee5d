"""Host memory that a rank's part of a checkpoint is copied into, so that training can go on while it is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pretrain.checkpoint.store.tensors import Region
from pretrain.checkpoint.write_plan import num_bytes

_ALIGNMENT = 64


class StagingBuffer:
    """One buffer, as large as the rank's part, allocated at the first save and used again by the later ones.

    Page-locked where there is a GPU to copy from.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, data: Mapping[Region, Tensor]) -> dict[Region, Tensor]:
        """Copies of all items in the buffer, complete when this returns; its previous contents are overwritten."""
        needed = num_bytes(data) + _ALIGNMENT * len(data)
        on_gpu = any(tensor.is_cuda for tensor in data.values())
        if self._buffer.nbytes < needed:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(needed, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        copies, position = {}, 0
        for region, tensor in data.items():
            place = self._buffer[position : position + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[region] = place.copy_(tensor.detach(), non_blocking=True)
            position += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if on_gpu:
            # Host sync: the next step overwrites what is being copied.
            torch.cuda.synchronize()
        return copies
