"""Addresses of tokens on the device: once per microbatch for all layers of a chunk that share them.

Legend: s tokens of a sequence on this context-parallel rank, b sequences, N highest order, A addresses of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.ngram_hashes.op import NgramHashes
from megamem.addresses.ngrams import MISSING_ID, Hashes, NgramAddressConfig
from megamem.chunk.halo import Halo, extended_in_one


class HashedNgrams(nn.Module):
    """Hashes of the n-grams that end at each token: addresses of rows, and behind them patterns of signs where rows have
    them.
    """

    def __init__(self, address: NgramAddressConfig, device: torch.device, ngram_hashes: NgramHashes) -> None:
        super().__init__()
        self.ids_before = address.ids_before
        kinds = (address.hashes, address.sign_hashes)
        self.hashed = nn.ModuleList(_Hashed(each, address, device, ngram_hashes) for each in kinds if each is not None)

    def forward(self, token_ids: Tensor, positions: Tensor, halo: Halo) -> Tensor:
        """[A, s, b] int64 of ids and positions [s, b], or [2 A, s, b] with signs; `halo` reaches the tokens before them."""
        extended = extended_in_one(halo, token_ids, self.ids_before)
        found = [hashed(extended, positions) for hashed in self.hashed]
        return found[0] if len(found) == 1 else torch.cat(found)


class _Hashed(nn.Module):
    """Hashes of one kind (`megamem.addresses.ngrams.Hashes`)."""

    multipliers: Tensor
    moduli: Tensor
    offsets: Tensor
    orders: Tensor
    missing_id: Tensor
    boundary_id: Tensor

    def __init__(
        self, hashes: Hashes, address: NgramAddressConfig, device: torch.device, ngram_hashes: NgramHashes
    ) -> None:
        super().__init__()
        self.hashes, self.cuts_at_boundary, self.ngram_hashes = hashes, address.cuts_at_boundary, ngram_hashes
        numbers = {
            "multipliers": hashes.multipliers,
            # Every address has a hash of its own: [A, 1].
            "moduli": [[each] for each in hashes.moduli],
            "offsets": [[each] for each in hashes.offsets],
            "orders": hashes.orders,
            "missing_id": MISSING_ID,
            "boundary_id": address.boundary_id,
        }
        # Checkpoints leave out what the configuration says.
        for name, number in numbers.items():
            self.register_buffer(name, torch.tensor(number, dtype=torch.int64, device=device), persistent=False)

    def forward(self, extended: Tensor, positions: Tensor) -> Tensor:
        """[A, s, b] of ids behind their halos (`megamem.chunk.halo.extended_in_one`) and positions [s, b]."""
        return self.ngram_hashes(
            extended,
            positions,
            self.multipliers,
            self.moduli,
            self.offsets,
            self.orders,
            self.missing_id,
            self.boundary_id,
            self.hashes.operation,
            self.cuts_at_boundary,
            self.hashes.missing,
        )
