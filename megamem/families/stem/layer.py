"""STEM's layer.

Legend: t tokens of a sequence on this rank, b sequences, T = t b, D hidden size, F inner width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.chunk.inputs import Inputs
from megamem.config.width import Width
from megamem.token_tables.layer import TokenTableLayer

from .config import StemConfig


class StemLayer(TokenTableLayer):
    """W_down (SiLU(W_gate n) * E[w]) for the feed-forward's normalised input n and the row of the token id w (section 3), or
    the sum of the rows of its addresses.

    Each tensor-parallel rank has both matrices in full and its own share of the tokens, as memories do.
    """

    memory: StemConfig

    def _build(self, hidden_size: int, seed: int) -> None:
        super()._build(hidden_size, seed)
        self.gate_proj = self._matrix(self.memory.value_dim, hidden_size, Width.BOTH)
        self.down_proj = self._matrix(hidden_size, self.memory.value_dim, Width.BOTH)

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """See `MemoryLayer.forward`."""
        x, rows = hidden.flatten(0, 1), self.rows(inputs)
        ones = torch.ones(*rows.shape, 1, dtype=x.dtype, device=rows.device)
        # Side by side, as a feed-forward's first linear makes them: backward then keeps this one tensor.
        gate_and_up = torch.cat((F.linear(x, self.gate_proj), self.lookup.read(rows, ones, None)), 1)
        out = F.linear(self.kernels.swiglu(gate_and_up), self.down_proj)
        self.observe(rows, None, out)
        return out.view_as(hidden)
