"""Checks of arguments that several ops share."""

from __future__ import annotations

from torch import Tensor


def check_contiguous(rows: Tensor) -> None:
    """Raises ValueError for a table that is not contiguous."""
    if not rows.is_contiguous():
        raise ValueError(f"the table's strides are {rows.stride()}: the memory kernels need contiguous rows")


def check_top_k(top_k: int, num_entries: int) -> None:
    """Raises ValueError where K is not in [1, N]."""
    if not 1 <= top_k <= num_entries:
        raise ValueError(f"top_k is {top_k}, but the list has {num_entries} entries: keep at least 1 and at most all")
