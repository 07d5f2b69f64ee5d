"""Rows of a token's n-grams: int64 arithmetic on the device, once per microbatch for all layers of a chunk.

Legend: s tokens of a sequence on this context-parallel rank, b sequences, N highest order, H heads, p rows of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def hashed_rows(tokens: Sequence[Tensor], multipliers: Tensor, sizes: Tensor, offsets: Tensor) -> Tensor:
    """[H, s, b] int64 rows of a layer's table: offset + (XOR over j < n of c_j m_j) mod p, order-major.

    Args:
        tokens: the window, [s, b] int64 each.
        multipliers: [N] int64, so small that no product overflows.
        sizes: [H] int64, p of every head; the heads of one order share its hash.
        offsets: [H] int64, where each head's rows begin.
    """
    mixed = tokens[0] * multipliers[0]
    rows = []
    by_order = zip(sizes.chunk(len(tokens) - 1), offsets.chunk(len(tokens) - 1), strict=True)
    for order, (own_sizes, own_offsets) in enumerate(by_order, start=1):
        mixed = mixed ^ (tokens[order] * multipliers[order])
        # Floor modulo, as both codes have it.
        rows.append(mixed % own_sizes[:, None, None] + own_offsets[:, None, None])
    return torch.cat(rows)
