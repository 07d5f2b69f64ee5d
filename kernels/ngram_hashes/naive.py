"""Reference of `ngram_hashes`: the formula in plain PyTorch, the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_hashes(
    extended: Tensor,
    positions: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    orders: Tensor,
    missing_id: Tensor,
    boundary_id: Tensor,
    operation: str,
    cut_at_boundary: bool,
    missing_row: int | None,
) -> Tensor:
    """Hashes of the n-grams that end at each token, K of every group's.

    out[g K + k] = offsets[g, k] + (c_0 m_g0 op c_1 m_g1 op ... c_{n-1} m_g{n-1}) mod moduli[g, k],  n = orders[g]

    c_0 is a token's own id and c_j the id j tokens before it, or `missing_id` where that is not there: before the start of
    its sequence and, with `cut_at_boundary`, from the last `boundary_id` before the token on.

    Legend: s tokens of a sequence, b sequences, c stretches of consecutive tokens, L = s / c tokens of each, N tokens of the
    longest n-gram.

    Args:
        extended: [c (N - 1 + L), b] int64 ids: every stretch behind the N - 1 ids before it.
        positions: [s, b] int64 places in sequences, or in documents that are apart.
        multipliers: [G, N] int64; those behind an n-gram's own tokens count for nothing.
        moduli, offsets: [G, K] int64.
        orders: [G] int64 in [2, N], tokens of each group's n-gram.
        missing_id: [] int64 id of what is not there.
        boundary_id: [] int64 id that hides itself and all before it from the tokens behind it.
        operation: "sum" or "xor". Products and sums wrap around at 64 bits.
        cut_at_boundary: hide ids at boundaries.
        missing_row: number behind the offset of n-grams that the start of a sequence cuts; None: they are hashed.

    Returns:
        [G K, s, b] int64.
    """
    max_order = multipliers.shape[1]
    num_stretches = (len(extended) - len(positions)) // (max_order - 1)
    stretches = extended.unflatten(0, (num_stretches, -1))
    length = len(positions) // num_stretches
    seen = torch.ones_like(positions, dtype=torch.bool)
    hashed = torch.zeros(len(multipliers), *positions.shape, dtype=torch.int64, device=positions.device)
    for lag in range(max_order):
        ids = stretches[:, max_order - 1 - lag :][:, :length].reshape(positions.shape)
        if lag > 0:
            seen = seen & (positions >= lag)
        if lag > 0 and cut_at_boundary:
            seen = seen & (ids != boundary_id)
        product = torch.where(seen, ids, missing_id) * torch.where(lag < orders, multipliers[:, lag], 0)[:, None, None]
        hashed = hashed + product if operation == "sum" else hashed ^ product
    found = hashed.unsqueeze(1) % moduli[..., None, None]
    if missing_row is not None:
        is_cut = positions < orders[:, None, None, None] - 1
        found = torch.where(is_cut, missing_row, found)
    return (found + offsets[..., None, None]).flatten(0, 1)
