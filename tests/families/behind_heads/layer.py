"""The layer behind attention's heads.

Legend: s tokens of a sequence and b sequences of this rank, T = s b, n heads of this tensor-parallel rank, d head
dimension.
"""

from __future__ import annotations

from torch import Tensor

from megamem.chunk.inputs import Inputs
from megamem.layers.layer import MemoryLayer

from .config import BehindHeadsConfig


class BehindHeadsLayer(MemoryLayer):
    """heads * values[token id mod M]."""

    memory: BehindHeadsConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        """No weights: the table is all."""

    def forward(self, heads: Tensor, inputs: Inputs) -> Tensor:
        """[s, b, n, d] for the heads of the same shape."""
        rows = (inputs.token_ids % self.view.num_rows).reshape(-1, 1)
        values = self.lookup.read(rows, heads.new_ones(*rows.shape, 1), None)
        out = heads * values.view(*heads.shape[:2], 1, -1)
        self.observe(rows, None, out.flatten(0, 1).flatten(1))
        return out

    def initial_output(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.initial_output`."""
        out: Tensor = self(hidden.unflatten(2, (-1, self.memory.value_dim)), inputs)
        return out.flatten(2)
