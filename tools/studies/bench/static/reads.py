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

    def longest_runs(self, items: int, cut: int) -> NDArray[np.int64]:
        """Entries of the longest run that begins in each tile of `items` sorted entries; runs end at multiples of `cut`,
        where the next begins."""
        lengths = self.counts[self.counts > 0]
        starts = np.cumsum(lengths) - lengths
        # The pieces of runs that cross a multiple.
        pieces = (starts + lengths - 1) // cut - starts // cut + 1
        run = np.repeat(np.arange(len(lengths)), pieces)
        nth = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begins = np.where(nth == 0, starts[run], (starts[run] // cut + nth) * cut)
        ends = np.minimum((begins // cut + 1) * cut, starts[run] + lengths[run])
        longest = np.zeros(-(-int(lengths.sum()) // items), dtype=np.int64)
        np.maximum.at(longest, begins // items, ends - begins)
        return longest
