"""One text as windows to evaluate, in which every token has a place of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TextWindows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Consecutive windows over a text that begins a document, as `HeldOutDataset` has them over many.

    A window is `tokens`, `labels`, `position_ids`, `domains` (the number of the target in the text), int64, and
    `loss_mask`, float32: 0 behind the text's end; each [sequence_length]. The first token of a window sees the one
    before it, and no other.
    """

    def __init__(self, ids: Sequence[int], sequence_length: int, eod: int) -> None:
        """Open the windows.

        Args:
            ids: tokens of the text, all of which are predicted.
            sequence_length: tokens per window.
            eod: id that ends documents, which stands before the text and pads it.
        """
        self.num_tokens, self.sequence_length = len(ids), sequence_length
        num_windows = -(-len(ids) // sequence_length)
        self._ids = torch.full((num_windows * sequence_length + 1,), eod)
        self._ids[1 : len(ids) + 1] = torch.tensor(ids)

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        positions = torch.arange(self.sequence_length)
        places = index * self.sequence_length + positions
        return {
            "tokens": self._ids[places],
            "labels": self._ids[places + 1],
            "loss_mask": (places < self.num_tokens).float(),
            "position_ids": positions,
            "domains": places.clamp(max=self.num_tokens - 1),
        }
