"""Addresses of tokens on the device: once per microbatch for all layers of a chunk that share them.

Legend: s tokens of a sequence on this context-parallel rank, b sequences, N highest order, A addresses of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megamem.addresses.ngrams import MISSING_ID, NgramAddressConfig
from megamem.addresses.window import window
from megamem.halo import Halo


class HashedNgrams(nn.Module):
    """Hashes of the n-grams that end at each token (`megamem.addresses.ngrams.Hashes`)."""

    orders: Tensor
    multipliers: Tensor
    moduli: Tensor
    offsets: Tensor

    def __init__(self, address: NgramAddressConfig, device: torch.device) -> None:
        super().__init__()
        self.hashes = address.hashes
        self.boundary_id, self.cuts_at_boundary = address.boundary_id, address.cuts_at_boundary
        # Checkpoints leave out what the configuration says.
        for name in ("orders", "multipliers", "moduli", "offsets"):
            numbers = torch.tensor(getattr(self.hashes, name), dtype=torch.int64, device=device)
            self.register_buffer(name, numbers, persistent=False)

    def forward(self, token_ids: Tensor, positions: Tensor, halo: Halo) -> Tensor:
        """[A, s, b] int64 of ids and positions [s, b]; `halo` reaches the tokens before them."""
        num_tokens = self.multipliers.shape[1]
        ids = window(
            token_ids,
            positions,
            halo,
            max_order=num_tokens,
            boundary_id=self.boundary_id,
            cut_at_boundary=self.cuts_at_boundary,
            missing_id=MISSING_ID,
        )
        mixed = self._product(ids[0], 0)
        for lag in range(1, num_tokens):
            product = self._product(ids[lag], lag)
            mixed = mixed + product if self.hashes.operation == "sum" else mixed ^ product
        found = mixed % self.moduli[:, None, None]
        if self.hashes.missing is not None:
            is_cut = positions < self.orders[:, None, None] - 1
            found = torch.where(is_cut, self.hashes.missing, found)
        return found + self.offsets[:, None, None]

    def _product(self, ids: Tensor, lag: int) -> Tensor:
        return ids * self.multipliers[:, lag, None, None]
