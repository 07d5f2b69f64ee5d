"""The Memory+ layer.

Legend: T tokens of this rank, D hidden size, V value dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megamem.config.width import Width
from megamem.layers.product_key import ProductKeyLayer


class MemoryPlusLayer(ProductKeyLayer):
    """Product keys whose summed values are multiplied by silu of a projection of the input, and always projected."""

    def _build(self, hidden_size: int, seed: int) -> None:
        super()._build(hidden_size, seed)
        self.silu_gate = self._matrix(self.memory.value_dim, hidden_size, Width.INPUTS)
        self.silu_gate_bias = self._bias(self.memory.value_dim)

    def project(self, values: Tensor, x: Tensor) -> Tensor:
        """W_v (o * silu(W_s x)), times the scalar gate."""
        return super().project(values * F.silu(F.linear(x, self.silu_gate, self.silu_gate_bias)), x)
