"""Parts of what a rank of a stage holds, and their sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class MemoryPart(StrEnum):
    """A part of what a rank's device holds, in the order of a report; and what it holds in host memory and in files."""

    WEIGHTS = "weights"
    TABLES = "tables"
    GRADIENTS = "gradients"
    TABLE_GRADIENTS = "table gradients"
    OPTIMIZER = "optimizer state"
    TABLE_OPTIMIZER = "optimizer state of tables"
    RESIDUAL = "residual stream and norms"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    MEMORY = "memory layers"
    EXCHANGE = "exchange"
    LOSS = "logits and loss"
    MESSAGES = "messages between stages"
    BACKWARD = "gradients of activations"
    STREAMS = "kept for one stream alone"
    OTHER = "other"
    HOST = "host memory"
    FILES = "tables in files"


STATE_PARTS = (
    MemoryPart.WEIGHTS,
    MemoryPart.TABLES,
    MemoryPart.GRADIENTS,
    MemoryPart.TABLE_GRADIENTS,
    MemoryPart.OPTIMIZER,
    MemoryPart.TABLE_OPTIMIZER,
)
"""Parts that are held from the first step to the last; the rest comes and goes within a step."""


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one rank of a stage.

    Attributes:
        by_part: bytes on the device at the peak of a step.
        host_tables: bytes in host memory: tables' optimizer state if it is there, and its staging memory.
        save: bytes in host memory that a save takes: the buffer of asynchronous ones, or that of the writing threads.
        files: bytes of tables, and their state, in files.
    """

    by_part: dict[MemoryPart, float]
    host_tables: float
    save: float
    files: float = 0.0

    @property
    def host(self) -> float:
        """Bytes that a rank takes of its node's memory, while it saves."""
        return self.host_tables + self.save

    @property
    def total(self) -> float:
        return sum(self.by_part.values())

    @property
    def held(self) -> float:
        """Bytes on the device between steps."""
        return sum(self.by_part[part] for part in STATE_PARTS)

    @property
    def activations(self) -> float:
        """Bytes that a step adds at its peak."""
        return self.total - self.held


def total(parts: Mapping[MemoryPart, float]) -> float:
    """Bytes of all parts."""
    return sum(parts.values())


def merged(*parts: Mapping[MemoryPart, float]) -> dict[MemoryPart, float]:
    """Sums by part, in the order of a report."""
    found = {part for each in parts for part in each}
    return {part: sum(each.get(part, 0.0) for each in parts) for part in MemoryPart if part in found}
