"""Width of ids: of rows, and of bins. Imports no torch: plans count with it."""

from __future__ import annotations


def bytes_per_id(num_ids: int) -> int:
    """Bytes of an id below `num_ids` wherever it is kept, sorted, sent or read: 4 where they do, else 8."""
    return 4 if num_ids <= 2**31 else 8
