"""Equal bits from equal runs on a GPU, where the fastest algorithms sum in an order that nobody decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """PyTorch takes only algorithms that give the same bits again, until the block ends.

    Sums in a fixed order: in the backward pass of attention, where that costs time, and of indexing. An operation that
    has no such algorithm raises.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # It also fills what is allocated, to show who reads it unset: here whole tables and buffers, at every step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]
