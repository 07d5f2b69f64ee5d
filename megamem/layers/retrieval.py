"""Common base of the layers that retrieve from a grid of keys, and what a retrieval gives them.

Legend: s sequence length and b sequences of this rank, T = s b tokens, D hidden size, H heads, N keys per side, M rows
(and columns) kept by the first stage, K retrieved, J = H K, C scores per entry (Tucker cores), V value dim, P pre-value
dim, B bins: sums per token, each with a projection of its own (mostly 1).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megamem.chunk.inputs import Inputs
from megamem.layers.layer import MemoryLayer
from megamem.retrieval.config import RetrievalConfig


@dataclass(frozen=True)
class Retrieved:
    """Entries that one layer retrieved for T tokens.

    Attributes:
        entries: [T, H, K], int64 positions row x N + column of the N x N grid, best first within a head.
        scores: [T, H, K, C], the weights of the entries. Tucker: the score of each core; they sum to what the selection
            ordered by. Product keys: the softmax of the summed scores within a head, C = 1.
        stage_ids: [2, T, H, M], int64 rows and columns kept by the first stage, best first.
        stage_scores: scores by which the first stage ranked rows and columns, [2, T, H, N]; differentiable, for the
            balance loss. Computed when called, because nothing else needs them.
    """

    entries: Tensor
    scores: Tensor
    stage_ids: Tensor
    stage_scores: Callable[[], Tensor]


class RetrievalLayer(MemoryLayer):
    """Retrieves K values per token and head and brings their weighted sum back to the residual stream.

    A variant says how it retrieves (`retrieve`), which rows stand behind the entries (`locate`), what the pre-values
    are multiplied with (`pre_input`) and how the sum is projected (`project`).
    """

    memory: RetrievalConfig

    @property
    def num_keys(self) -> int:
        """N: keys per side, e times what the layer's window has rows for."""
        return self.memory.expansion * self.view.num_keys

    @abstractmethod
    def retrieve(self, x: Tensor) -> Retrieved:
        """Entries and scores of the tokens `x` [T, D]; scores are fp32 (fp64 for fp64 inputs)."""

    @abstractmethod
    def locate(self, entries: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows of the bank behind the entries, and the bin of each one's value (None if B is 1)."""

    def pre_input(self, x: Tensor) -> Tensor | None:
        """Factor of the pre-values, [T, P] of the tokens `x` [T, D]; None without pre-values."""
        return None

    @abstractmethod
    def project(self, values: Tensor, x: Tensor) -> Tensor:
        """The output [T, D] from the weighted values [T, B V] of the tokens `x` [T, D]."""

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.forward`; what is retrieved depends on the hidden states alone."""
        x = hidden.flatten(0, 1)
        found = self.retrieve(x)
        rows, bins = self.locate(found.entries.flatten(1))
        scores = found.scores.flatten(1, 2).to(x.dtype)
        values = self.lookup.read(rows, scores, self.pre_input(x), bins, self.memory.lookup.bins)
        out = self.project(values, x)
        # Gradients alone do not make it training: those of evaluations are of the loss that is measured.
        if self.losses is not None and self.training and torch.is_grad_enabled():
            out = self.losses.inject(out, self.cores, found.stage_scores, found.stage_ids, hidden.shape[1])
        self.observe(rows, found.scores, out)
        return out.view_as(hidden)
