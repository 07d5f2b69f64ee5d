"""The layer of n-grams in the input embedding.

Legend: t tokens of a sequence on this rank, b sequences, T = t b, D hidden size, A addresses of a token, V columns of a row,
E = A V.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from megamem.chunk.inputs import Inputs
from megamem.config.width import Width
from megamem.token_tables.signed_rows import SignedRowsLayer

from .config import NgramEmbeddingConfig


class NgramEmbeddingLayer(SignedRowsLayer):
    """(E_0[w] + sum_a W_a e_a) / (A + 1) for the input embedding E_0[w] of a token and the rows e_a of its addresses (LongCat,
    arXiv 2601.21204), amplified.
    """

    memory: NgramEmbeddingConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        super()._build(hidden_size, seed)
        # W_1 .. W_A, side by side.
        self.up_proj = self._matrix(hidden_size, self.memory.memory_width, Width.OUTPUTS)

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """[t, b, D] of the input embedding `hidden` [t, b, D]."""
        mean = (hidden + self._projected(inputs, hidden)) / (self.memory.rows_per_token + 1)
        match self.memory.amplification:
            case "sqrt_width":
                return mean * math.sqrt(hidden.shape[-1])
            case "layer_norm":
                return F.layer_norm(mean, mean.shape[-1:], eps=self.epsilon)
        return mean

    def initial_output(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.initial_output`: the part of the mean that is not the embedding's."""
        return self._projected(self.alone(inputs), hidden) / (self.memory.rows_per_token + 1)

    def _projected(self, inputs: Inputs, like: Tensor) -> Tensor:
        """sum_a W_a e_a [t, b, D] for the tokens of `inputs`, of the dtype of `like` [t, b, D]."""
        rows = self.rows(inputs)
        out = F.linear(self.read_signed(rows, inputs, like.dtype).flatten(1), self.up_proj)
        self.observe(rows, None, out)
        return out.view_as(like)
