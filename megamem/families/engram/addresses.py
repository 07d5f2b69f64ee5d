"""Rows of a token's n-grams: int64 arithmetic on the device, once per microbatch for all layers of a chunk.

Legend: L layers, s tokens of a sequence on this context-parallel rank, b sequences, N highest order, H heads, p rows of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def hashed_rows(tokens: Sequence[Tensor], multipliers: Tensor, sizes: Tensor, offsets: Tensor) -> Tensor:
    """[L H, s, b] int64 rows of layers' tables: offset + (XOR over j < n of c_j m_j) mod p, order-major in a layer.

    As many operations for any number of layers.

    Args:
        tokens: the window, [s, b] int64 each.
        multipliers: [L, N] int64, so small that no product overflows.
        sizes: [L, H] int64, p of every head; the heads of one order share its hash.
        offsets: [L, H] int64, where each head's rows begin.
    """
    factors = multipliers[:, :, None, None]
    mixed = [tokens[0] * factors[:, 0]]
    for order, ids in enumerate(tokens[1:], start=1):
        mixed.append(mixed[-1] ^ (ids * factors[:, order]))
    hashes = torch.stack(mixed[1:], 1).unsqueeze(2)
    own_sizes, own_offsets = (
        numbers.unflatten(1, (hashes.shape[1], -1))[..., None, None] for numbers in (sizes, offsets)
    )
    # Floor modulo, as both codes have it.
    return (hashes % own_sizes).add_(own_offsets).flatten(0, 2)
