"""Addresses of tokens on the device: once per microbatch for all layers of a chunk that share them.

Legend: s tokens of a sequence on this context-parallel rank, b sequences, N highest order, A addresses of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megamem.addresses.ngrams import MISSING_ID, Hashes, NgramAddressConfig
from megamem.addresses.window import window
from megamem.halo import Halo


class HashedNgrams(nn.Module):
    """Hashes of the n-grams that end at each token: addresses of rows, and behind them patterns of signs where rows have
    them.
    """

    def __init__(self, address: NgramAddressConfig, device: torch.device) -> None:
        super().__init__()
        self.boundary_id, self.cuts_at_boundary = address.boundary_id, address.cuts_at_boundary
        self.max_order = address.max_order
        hashes = (address.hashes, address.sign_hashes)
        self.hashed = nn.ModuleList(_Hashed(each, device) for each in hashes if each is not None)

    def forward(self, token_ids: Tensor, positions: Tensor, halo: Halo) -> Tensor:
        """[A, s, b] int64 of ids and positions [s, b], or [2 A, s, b] with signs; `halo` reaches the tokens before them."""
        ids = window(
            token_ids,
            positions,
            halo,
            max_order=self.max_order,
            boundary_id=self.boundary_id,
            cut_at_boundary=self.cuts_at_boundary,
            missing_id=MISSING_ID,
        )
        return torch.cat([hashed(ids, positions) for hashed in self.hashed])


class _Hashed(nn.Module):
    """Hashes of one kind (`megamem.addresses.ngrams.Hashes`)."""

    orders: Tensor
    multipliers: Tensor
    moduli: Tensor
    offsets: Tensor

    def __init__(self, hashes: Hashes, device: torch.device) -> None:
        super().__init__()
        self.hashes = hashes
        # Checkpoints leave out what the configuration says.
        for name in ("orders", "multipliers", "moduli", "offsets"):
            numbers = torch.tensor(getattr(hashes, name), dtype=torch.int64, device=device)
            self.register_buffer(name, numbers, persistent=False)

    def forward(self, ids: Sequence[Tensor], positions: Tensor) -> Tensor:
        """[A, s, b] of the last ids [s, b] of each token, its own first, and positions [s, b]."""
        mixed = self._product(ids[0], 0)
        for lag, before in enumerate(ids[1:], 1):
            product = self._product(before, lag)
            mixed = mixed + product if self.hashes.operation == "sum" else mixed ^ product
        found = mixed % self.moduli[:, None, None]
        if self.hashes.missing is not None:
            is_cut = positions < self.orders[:, None, None] - 1
            found = torch.where(is_cut, self.hashes.missing, found)
        return found + self.offsets[:, None, None]

    def _product(self, ids: Tensor, lag: int) -> Tensor:
        return ids * self.multipliers[:, lag, None, None]
