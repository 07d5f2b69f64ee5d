"""Rows that a lookup reads, drawn: evenly, or by Zipf's law; and what follows from how often each is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Reads:
    """Reads of a table: the n-th most frequent row is read n^-exponent as often as the first.

    Attributes:
        num_rows: of the table.
        num_entries: reads, about.
        exponent: 0: all rows alike.
    """

    num_rows: int
    num_entries: int
    exponent: float = 0.0

    @property
    def name(self) -> str:
        return f"Zipf {self.exponent:g}" if self.exponent else "uniform"

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Reads of each row: Poisson's numbers, in the order of the rows, which is not that of frequency."""
        generator = np.random.default_rng(0)
        if self.exponent:
            frequencies = np.arange(1, self.num_rows + 1, dtype=np.float64) ** -self.exponent
            counts = generator.poisson(self.num_entries * frequencies / frequencies.sum())
            generator.shuffle(counts)
            return counts
        return generator.poisson(self.num_entries / self.num_rows, self.num_rows)

    @cached_property
    def num_distinct(self) -> int:
        """Rows that are read at all."""
        return int(np.count_nonzero(self.counts))

    def misses(self, cached_rows: int) -> int:
        """Reads from memory where a cache always holds the most frequent rows: one of each of them, and all others."""
        total, misses = 0, 0
        # From the most frequent on: rows that are read so often.
        for times, rows in enumerate(self._rows_by_count[::-1]):
            count = len(self._rows_by_count) - 1 - times
            cached = min(rows, cached_rows - total) if count else 0
            total += cached
            misses += cached + (rows - cached) * count
        return misses

    @cached_property
    def _rows_by_count(self) -> list[int]:
        """Rows that are read 0 times, once, twice, ..."""
        return [int(rows) for rows in np.bincount(self.counts)]

    def run_lengths(self, block: int, num_slots: int) -> NDArray[np.int64]:
        """Entries of the runs of `segment_accumulate`: the blocks of rows that begin in so many slots of `block` entries."""
        lengths = self.counts[self.counts > 0]
        starts, blocks = np.cumsum(lengths) - lengths, -(-lengths // block)
        row = np.repeat(np.arange(len(lengths)), blocks)
        begins = starts[row] + (np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * block
        num_entries = int(lengths.sum())
        cuts = np.searchsorted(begins, np.arange(0, num_entries, num_slots * block))
        return np.diff(np.append(begins, num_entries)[np.append(cuts, len(begins))])
