"""Refusals of arguments that several ops share."""

from __future__ import annotations

from torch import Tensor


def check_contiguous(rows: Tensor) -> None:
    """Refuses tables whose rows a kernel would not find.

    Raises:
        ValueError: they are not contiguous.
    """
    if not rows.is_contiguous():
        raise ValueError(f"the table's strides are {rows.stride()}: the memory kernels need contiguous rows")


def check_top_k(top_k: int, num_entries: int) -> None:
    """Refuses to keep more than there is.

    Raises:
        ValueError: K is not in [1, N].
    """
    if not 1 <= top_k <= num_entries:
        raise ValueError(f"top_k is {top_k}, but the list has {num_entries} entries: keep at least 1 and at most all")
