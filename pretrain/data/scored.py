"""Tokens of a stream that count in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pretrain.data.manifest import PreparedDataset

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset


@dataclass(frozen=True)
class ScoredTokens:
    """Scored tokens of a stream: in each document, those behind its prompt.

    Attributes:
        starts: [documents], the first token of each.
        first: [documents], the first one that is scored.
        ends: [documents], behind the last one.
    """

    starts: NDArray[np.int64]
    first: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, dataset: PreparedDataset, split: str, documents: IndexedDataset) -> ScoredTokens | None:
        """Scored tokens of a split; None: all are."""
        prompts = dataset.open_prompts(split)
        if prompts is None:
            return None
        ends = np.cumsum(documents.sequence_lengths, dtype=np.int64)
        starts = ends - documents.sequence_lengths
        return cls(starts, starts + prompts["tokens"], ends)

    def flags(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Flags of the tokens [start, stop) of the stream: True where one is scored."""
        tokens = np.arange(start, stop)
        found: NDArray[np.bool_] = tokens >= self.first[np.searchsorted(self.ends, tokens, side="right")]
        return found

    def count(self, stop: int) -> int:
        """Number of scored tokens among the first `stop`."""
        return int(np.clip(np.minimum(self.ends, stop) - self.first, 0, None).sum())
