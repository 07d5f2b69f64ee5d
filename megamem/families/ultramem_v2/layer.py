"""The UltraMemV2 memory layer (UltraMemV2, section 3; Eq. 6-7, 12, 15).

Legend: T tokens of this rank, D hidden size, P pre-value dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megamem.config.width import Width
from megamem.layers.tucker import TuckerLayer


class UltraMemV2Layer(TuckerLayer):
    """Tucker-decomposed retrieval of values, weighted by products of pre-values and the projected input (Eq. 15)."""

    def _build(self, hidden_size: int, seed: int) -> None:
        super()._build(hidden_size, seed)
        width = self.memory.pre_value_dim
        self.pre_value_proj = self._matrix(width, hidden_size, Width.INPUTS) if width else None

    def pre_input(self, x: Tensor) -> Tensor | None:
        """The projected input, [T, P]."""
        return F.linear(x, self.pre_value_proj) if self.pre_value_proj is not None else None

    @property
    def pre_input_variance(self) -> float:
        """Variance of the projected input, for inputs of mean square 1."""
        weights = self.pre_value_proj
        # Host sync: at initialisation.
        return 0.0 if weights is None else self.config.hidden_size * float(weights.square().mean())
