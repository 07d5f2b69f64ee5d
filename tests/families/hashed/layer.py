"""The hashed layer.

Legend: s tokens of a sequence and b sequences of this rank, T = s b, D hidden size, J rows per token, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.hashing import mix
from megamem.banks.hashing import key_of
from megamem.chunk.inputs import Inputs
from megamem.layers.layer import MemoryLayer

from .config import HashedConfig


class HashedLayer(MemoryLayer):
    """W sum_j values[hash_j(token id)]."""

    memory: HashedConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        self.out_proj = self._weight(hidden_size, self.memory.value_dim)
        self.hash_keys = [key_of(seed, self.name, str(j)) for j in range(self.memory.num_hashes)]

    def rows(self, token_ids: Tensor) -> Tensor:
        """[T, J] rows of the bank for [T] ids."""
        hashes = torch.stack([mix(token_ids, key) for key in self.hash_keys], dim=1)
        return hashes % self.view.num_rows

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.forward`."""
        rows = self.rows(inputs.token_ids.flatten())
        values = self.lookup.read(rows, hidden.new_ones(*rows.shape, 1), None)
        out = F.linear(values, self.out_proj)
        self.observe(rows, None, out)
        return out.view_as(hidden)
