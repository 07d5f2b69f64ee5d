"""The PEER layer.

Legend: T tokens of this rank, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from megamem.layers.product_key import ProductKeyLayer


class PeerLayer(ProductKeyLayer):
    """PEER: every row is a feed-forward of inner width 1, gelu(<u, x>) v (Eq. 13 of the input, scores softmaxed)."""

    def pre_input(self, x: Tensor) -> Tensor | None:
        """The input: pre-values are as wide as the hidden state."""
        return x
