"""Bytes that a GPU moves at the least, and for a sort. Imports no torch: plans count with it."""

from __future__ import annotations

SECTOR_BYTES = 32
"""Bytes that a cache asks for at a time: a random read of one number moves as many."""
GRANULE_BYTES = 64
"""Bytes that device memory moves at a time."""
SORTED_IN_PLACE = 4096
"""Length of rows up to which PyTorch sorts them where they are, by one block each."""
MOST_JOINED_ENTRIES = 1 << 25
"""Entries of lookups that are sorted and added up as one, at most: the sort takes 0.8 GB. One lookup may have more."""
ENTRIES_PER_JOINED_VECTOR = 2
"""Entries per vector from which on lookups are joined: the copy of the vectors moves a quarter, at most, of what their rows do."""


def radix_sort_bytes(key: int, value: int, num_passes: int) -> int:
    """Bytes per element of CUB's radix sort of pairs: one read of the keys for a histogram, and passes over both."""
    return key + num_passes * 2 * (key + value)
