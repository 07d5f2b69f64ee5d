"""Seconds that a rank's lookups take of its device memory: rows, their ids and coefficients, and gradients of tables.

Rows count in whole granules of what DRAM moves at a time, ids and coefficients as often as a kernel reads or writes
them. What the ranks of the memory group send each other is in `pretrain.planning.costs.traffic`.

Legend: G ranks of the memory group, T tokens of a rank, J rows read per token, M = G T J entries, n coefficients per row and rank, e bytes per element.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from kernels.common.ids import bytes_per_id
from kernels.common.tiles import accumulate_instructions
from megamem.memory_config import MemoryConfig
from parallel.layout import coefficients_per_rank
from pretrain.config.schema import RunConfig
from pretrain.planning.costs.hardware import Hardware
from pretrain.planning.costs.stages import Stage

GRANULE_BYTES = 64
"""Bytes that DRAM of a GPU moves at the least."""
_SORT_BYTES = 4 + 4 * 24
"""Bytes per entry of a sort by row (`kernels.segment_accumulate`): ids of 32 bits, read once for a histogram, and four
passes that read and write them with their 64-bit places."""
_ORDER_BYTES = 4 + 8
"""Bytes per entry that `segment_accumulate` reads of the sort's result."""
SECTOR_BYTES = 32
"""Bytes that a read of one coefficient, in the order of rows, moves into the cache."""


@dataclass(frozen=True)
class RowSeconds:
    """Seconds of lookups.

    Attributes:
        gathers: rows of tables, read for sums, products and the gradients of coefficients and inputs.
        ids: copies of ids and coefficients.
        sort: of the entries by row.
        gradients: sums over the entries of each row, added to the tables' fp32 gradients.
    """

    gathers: float = 0.0
    ids: float = 0.0
    sort: float = 0.0
    gradients: float = 0.0

    def __add__(self, other: RowSeconds) -> RowSeconds:
        return RowSeconds(
            self.gathers + other.gathers,
            self.ids + other.ids,
            self.sort + other.sort,
            self.gradients + other.gradients,
        )

    def __rmul__(self, number: float) -> RowSeconds:
        return RowSeconds(number * self.gathers, number * self.ids, number * self.sort, number * self.gradients)


def row_seconds(config: RunConfig, stage: Stage, tokens: int, hardware: Hardware) -> RowSeconds:
    """Seconds of a stage's lookups of one microbatch, with `tokens` on a rank; recomputation repeats forward."""
    memory = config.model.memory
    total = RowSeconds()
    if memory is None:
        return total
    again = config.train.recompute == "full" and not stage.reads_before_blocks
    num_entries = config.parallel.memory * tokens * memory.lookup.rows
    for bank_rows, number in Counter(stage.lookups).items():
        total += number * _one_way(config, memory, bank_rows, num_entries, hardware)
    for bank_rows, number in Counter(stage.backward_lookups).items():
        both = _backward(config, memory, bank_rows, num_entries, hardware)
        if again:
            both += _one_way(config, memory, bank_rows, num_entries, hardware)
        total += number * both
    return total


def _one_way(
    config: RunConfig, memory: MemoryConfig, bank_rows: int, num_entries: int, hardware: Hardware
) -> RowSeconds:
    """Forward pass of a lookup: every table's rows, read by one kernel; the same again is part of backward."""
    group, element, lookup = config.parallel.memory, config.train.element_bytes, memory.lookup
    bins, per_id = lookup.bins > 1, bytes_per_id(bank_rows * lookup.bins)
    coefficient = coefficients_per_rank(lookup.scores, group) * element
    per_entry, rows = 0.0, 0.0
    for table in memory.tables:
        rows += moved_bytes(table.width // group * element)
        # Ids, with bins where there are several, and a coefficient or product per entry.
        per_entry += per_id * (1 + bins) + coefficient
    if group > 1:
        # A number of both, twice read for the row and the bin in it.
        per_entry += 4 * per_id * bins
        # Cut by ranks, sent and received; products are received to be summed.
        per_entry += 3 * coefficient + (3 * element if memory.width("pre_values") else 0)
    return RowSeconds(
        gathers=num_entries * rows / hardware.gather_bytes_per_s,
        ids=num_entries * per_entry / hardware.stream_bytes_per_s,
    )


def _backward(
    config: RunConfig, memory: MemoryConfig, bank_rows: int, num_entries: int, hardware: Hardware
) -> RowSeconds:
    """Backward pass of a lookup: the rows again for the gradients of what weights them, and those of the tables."""
    group = config.parallel.memory
    sorting = num_entries * _SORT_BYTES / hardware.stream_bytes_per_s
    accumulating = 0.0
    for table in memory.tables:
        groups = coefficients_per_rank(memory.lookup.scores, group) if table.name != "pre_values" else 1
        accumulating += accumulate_s(num_entries, bank_rows, table.width // group, groups, hardware)
    own = RowSeconds(sort=sorting, gradients=accumulating)
    return own + _one_way(config, memory, bank_rows, num_entries, hardware)


def accumulate_s(num_entries: int, num_rows: int, width: int, num_groups: int, hardware: Hardware) -> float:
    """Seconds of `kernels.segment_accumulate` on a GPU: of the bytes that it moves, or of its instructions if they take
    longer.

    A row is read and written once, in fp32, however many entries it has: fewer rows move where reads are skewed, and as
    many instructions are issued. An entry brings its row, its place in the order and a coefficient, which is a random
    read; its vector is in the cache.

    Args:
        num_entries: M.
        num_rows: of the table.
        width: columns on this rank.
        num_groups: of columns, each with a coefficient of its own.
    """
    rows = distinct_rows(num_entries, num_rows, hardware.row_skew)
    num_bytes = rows * 2 * moved_bytes(4 * width) + num_entries * (_ORDER_BYTES + SECTOR_BYTES)
    instructions = num_entries * num_groups * accumulate_instructions(width // num_groups)
    return max(num_bytes / hardware.gather_bytes_per_s, instructions / (hardware.issue_g_per_s * 1e9))


def moved_bytes(row_bytes: int, granule_bytes: int = GRANULE_BYTES) -> int:
    """Bytes of the granules that a row touches, on the average over the rows of a table."""
    return row_bytes + granule_bytes - math.gcd(row_bytes, granule_bytes)


@lru_cache(maxsize=4096)
def distinct_rows(num_entries: int, num_rows: int, skew: float) -> float:
    """Rows of a table that so many entries read, on the average, where the r-th most popular is read as r^-skew.

    Ranks are taken together in intervals that grow by a twentieth.
    """
    if skew == 0:
        return -num_rows * math.expm1(-num_entries / num_rows)
    edges = [0]
    while edges[-1] < num_rows:
        edges.append(min(num_rows, max(edges[-1] + 1, edges[-1] * 21 // 20)))
    intervals = [(high - low, ((low + 1 + high) / 2) ** -skew) for low, high in pairwise(edges)]
    total = sum(number * weight for number, weight in intervals)
    return -sum(number * math.expm1(-num_entries * weight / total) for number, weight in intervals)
