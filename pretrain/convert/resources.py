"""Resources of whatever reads or writes whole checkpoints. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pretrain.errors import ConfigError

OnStart = Callable[[str, int], Callable[[int], None]]
"""Listener that is told of a phase's name and bytes when it begins, and returns what is told of its progress."""

MIB = 2**20
RESERVE_BYTES = 1024 * MIB
"""Memory that is left to Python, torch and the indices of large checkpoints."""
_COPIES = 4
"""Copies of a piece that a thread holds at a time: as read, assembled, in its dtype, and on its way to the file."""
_LARGEST_PIECE_BYTES = 64 * MIB
_SMALLEST_PIECE_BYTES = MIB


@dataclass(frozen=True)
class Resources:
    """Resources that a conversion may use.

    Attributes:
        num_workers: threads.
        max_memory_bytes: memory of this process, in bytes.
    """

    num_workers: int
    max_memory_bytes: int

    def __post_init__(self) -> None:
        least = RESERVE_BYTES + self.num_workers * _COPIES * _SMALLEST_PIECE_BYTES
        if self.max_memory_bytes < least:
            raise ConfigError(
                f"--max-memory is {self.max_memory_bytes / MIB:,.0f} MiB, and {self.num_workers} workers need "
                f"{least / MIB:,.0f} MiB: give more, or fewer --workers"
            )

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece of a tensor, of which a thread holds one at a time."""
        share = (self.max_memory_bytes - RESERVE_BYTES) // (self.num_workers * _COPIES)
        return min(share, _LARGEST_PIECE_BYTES)
