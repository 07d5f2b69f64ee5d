"""Window of a token: its own id and the ids before it, of which n-grams are made.

Legend: s tokens of a sequence on this context-parallel rank, b sequences, N highest order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.halo import Halo, shifted


def window(
    ids: Tensor,
    positions: Tensor,
    halo: Halo,
    *,
    max_order: int,
    boundary_id: int | Tensor,
    cut_at_boundary: bool,
    missing_id: int | None = None,
) -> list[Tensor]:
    """c_0 .. c_{N-1}, [s, b] each: a token's own id, and the ids before it.

    `positions` [s, b] count from the start of the sequence, or of the document where documents are separate. What would
    stand before it reads `missing_id`, or without one `boundary_id`. With `cut_at_boundary` a predecessor of that id hides all older ones, too; a
    token of that id sees its own window.
    """
    missing = boundary_id if missing_id is None else missing_id
    extended = halo.extended(ids, max_order - 1)
    found, seen = [ids], torch.ones_like(ids, dtype=torch.bool)
    for lag in range(1, max_order):
        before = shifted(extended, max_order - 1, lag)
        inside = positions >= lag
        seen = seen & inside & (before != boundary_id) if cut_at_boundary else inside
        found.append(torch.where(seen, before, missing))
    return found
