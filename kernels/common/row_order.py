"""The sort cache: entries are sorted by row once for all tables that are read by the same ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Order: TypeAlias = tuple[Tensor, Tensor]
_ATTRIBUTE = "_megamem_row_order"


def shared_order(ids: Tensor, num_rows: int, sort: Callable[[Tensor, int], Order]) -> Order:
    """`sort(ids, num_rows)`, or what it returned when it was last called for this tensor.

    Values and pre-values are read by one tensor of ids, and the backward pass of each wants them sorted. The result is
    kept on that tensor, so it lives as long as the graph that needs it; a tensor written to in between is sorted again.
    `torch.compile` merges equal calls itself, so nothing is kept while it traces.

    Args:
        ids: [T, J].
        num_rows: of the table.
        sort: returns two tensors that depend on its arguments alone.
    """
    if torch.compiler.is_compiling():
        return sort(ids, num_rows)
    key = (sort, num_rows, ids._version)
    known = getattr(ids, _ATTRIBUTE, None)
    if known is None or known[0] != key:
        known = (key, sort(ids, num_rows))
        setattr(ids, _ATTRIBUTE, known)
    order: Order = known[1]
    return order
