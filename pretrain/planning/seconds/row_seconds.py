"""Seconds that a rank's lookups take of its device memory: rows, their ids and coefficients, and gradients of tables.

Rows count in whole granules of what DRAM moves at a time, but for popular ones, which the cache keeps; ids and coefficients as often as a kernel reads or writes
them. What the ranks of the memory group send each other is in `pretrain.planning.seconds.traffic`.

With parts of rows a rank has the ids and coefficients of all entries, and sorts all ids. Kernels pass over those whose
rows others hold: they move no rows, and gradients of tables end where the rank's own entries do.

Legend: G ranks of the memory group, R parts of rows, T tokens of a rank, J rows read per token, M = G T J entries, n
coefficients per row and rank, e bytes per element.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from kernels.common.device_bytes import GRANULE_BYTES, SECTOR_BYTES, radix_sort_bytes
from kernels.common.ids import bytes_per_id
from kernels.common.tiles import accumulate_instructions
from parallel.layout import coefficients_per_rank, columns_meet_first
from pretrain.config.schema import RunConfig
from pretrain.config.updates import GRADIENT_BYTES, table_gradient_bytes
from pretrain.planning.bytes.added_lookups import entries_of_lookup, lookups_in_backward
from pretrain.planning.bytes.row_bytes import scaled_bytes
from pretrain.planning.counts.pipeline_stages import FamilyInStage, Stage
from pretrain.planning.seconds.hardware import Hardware

_SORT_BYTES = radix_sort_bytes(4, 8, num_passes=4)
"""Bytes per entry of a sort by row (`kernels.segment_accumulate`): of ids of 32 bits, with their 64-bit places."""
_SORT_SLOWER = 2.5
"""Times as long as a stream of these bytes: a pass writes where the keys ask for it."""
_ORDER_BYTES = 4 + 8
"""Bytes per entry that `segment_accumulate` reads of the sort's result."""
CACHED_BYTES = 25e6
"""Bytes that stay in cache, half of an H100's: of tokens' vectors while gradients of tables read them, and of popular rows
while they are gathered."""
BUSIEST = {1: 1.0, 2: 1.005, 4: 1.023, 8: 1.039, 16: 1.082, 32: 1.157}
"""Entries of the busiest of R parts of the rows, over their mean, with reads by Zipf's law with 0.8, as the keyed shuffle
spreads them (counted by `tools/maintenance/bank_splits.py` of 800f94cf)."""


@dataclass(frozen=True)
class RowSeconds:
    """Seconds of lookups.

    Attributes:
        gathers: reads of rows of tables, for sums, products and the gradients of coefficients and inputs.
        ids: copies of ids and coefficients, and products of what is gathered with scales of tables.
        sort: sort of the entries by row.
        gradients: sums over the entries of each row, added to the tables' gradients.
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
    total = RowSeconds()
    for family in stage.families:
        again = config.train.recompute == "full" and not family.memory.reads_once
        num_entries = entries_of_lookup(config, family, tokens)
        for bank_rows, number in Counter(family.lookups).items():
            total += number * _forward(config, family, bank_rows, num_entries, hardware)
        for bank_rows, number, together in lookups_in_backward(config, stage, family, tokens):
            both = _backward(config, family, bank_rows, num_entries, together, hardware)
            if again:
                both += _forward(config, family, bank_rows, num_entries, hardware)
            total += number * both
    return total


def _forward(
    config: RunConfig, family: FamilyInStage, bank_rows: int, num_entries: int, hardware: Hardware
) -> RowSeconds:
    """Forward pass of a lookup; with parts of rows the place of each entry in the rank's part comes first, and with a scale
    the product with it last."""
    memory = family.memory
    placed = 2 * bytes_per_id(bank_rows * memory.lookup.bins) * (config.parallel.memory_rows > 1)
    scaled = scaled_bytes(config, memory, num_entries // memory.lookup.rows, backward=False)
    copying = RowSeconds(ids=(num_entries * placed + scaled) / hardware.stream_bytes_per_s)
    return _one_way(config, family, bank_rows, num_entries, hardware) + copying


def _one_way(
    config: RunConfig, family: FamilyInStage, bank_rows: int, num_entries: int, hardware: Hardware
) -> RowSeconds:
    """Seconds that both passes of a lookup take: every table's rows, read by one kernel, and exchanged bytes, copied."""
    memory, layout, element = family.memory, config.parallel, config.train.element_bytes
    lookup = memory.lookup
    bins, per_id = lookup.bins > 1, bytes_per_id(bank_rows * lookup.bins)
    coefficient = coefficients_per_rank(lookup.scores, layout.memory_columns) * element
    product = element if memory.width("pre_values") else 0
    per_entry, rows = 0.0, 0.0
    for table in memory.tables:
        of_row = moved_bytes(table.width // layout.memory_columns * element)
        rows += of_row * missed_share(family.rows_seen(bank_rows) // layout.memory_rows, of_row, hardware.row_skew)
        # Ids, with bins where there are several, and a coefficient or product per entry.
        per_entry += per_id * (1 + bins) + coefficient
    if layout.memory > 1:
        # A number of both, twice read for the row and the bin in it.
        per_entry += 4 * per_id * bins
        # Cut by ranks, sent and received; products are received to be summed.
        per_entry += 3 * coefficient + 3 * product
    copied = 0.0
    if layout.memory_rows > 1:
        # All scores come, of which each column has its own.
        per_entry += 2 * lookup.scores * element
        if columns_meet_first(layout.memory_rows, layout.memory_columns, num_entries // (layout.memory * lookup.rows)):
            # Shares of tokens are cut, and their sums written, sent, received and added up.
            per_entry += 2 * max(product, coefficient) + 4 * lookup.scores * element / layout.memory_columns
        # Partial sums and inputs of all tokens, once per part: written, cut or added up, sent and received.
        tokens = num_entries // (layout.memory * lookup.rows)
        widths = memory.row_width + (lookup.bins - 1) * memory.width("values")
        copied = 4 * (layout.memory_rows - 1) * tokens * element * widths
    return RowSeconds(
        gathers=own_entries(config, num_entries, hardware) * rows / hardware.gather_bytes_per_s,
        ids=(num_entries * per_entry + copied) / hardware.stream_bytes_per_s,
    )


def own_entries(config: RunConfig, num_entries: int, hardware: Hardware) -> float:
    """Entries whose rows the busiest rank has."""
    parts = config.parallel.memory_rows
    mean = num_entries / parts
    if not hardware.row_skew:
        return mean
    return mean * next((busiest for most, busiest in BUSIEST.items() if parts <= most), max(BUSIEST.values()))


def _backward(
    config: RunConfig, family: FamilyInStage, bank_rows: int, num_entries: int, together: float, hardware: Hardware
) -> RowSeconds:
    """Backward pass of one of the lookups that are added up together: the rows again for the gradients of what weights
    them, and its share of those of the tables."""
    memory, layout = family.memory, config.parallel
    sorting = _SORT_SLOWER * num_entries * _SORT_BYTES / hardware.stream_bytes_per_s
    entries = together * own_entries(config, num_entries, hardware)
    # Windows of a ring meet: what several layers read is no more than the bank.
    num_rows = int(min(bank_rows, together * family.rows_seen(bank_rows))) // layout.memory_rows
    accumulating = 0.0
    for table in memory.tables:
        groups = coefficients_per_rank(memory.lookup.scores, layout.memory_columns) if table.name != "pre_values" else 1
        width = table.width // layout.memory_columns
        accumulating += accumulate_s(
            entries, num_rows, width, groups, hardware, gradient_bytes=table_gradient_bytes(config.optimizer)
        )
        if layout.memory_rows > 1 or together > 1:
            # Vectors of several lookups, or of all tokens in columns of more than one rank, leave the cache, and are read
            # once per entry.
            vectors = together * num_entries // memory.lookup.rows * width * config.train.element_bytes
            missed = max(0.0, 1 - CACHED_BYTES / vectors) * moved_bytes(width * config.train.element_bytes)
            accumulating += entries * missed / hardware.gather_bytes_per_s
    scaled = scaled_bytes(config, memory, num_entries // memory.lookup.rows, backward=True)
    own = RowSeconds(ids=scaled / hardware.stream_bytes_per_s, sort=sorting, gradients=accumulating / together)
    return own + _one_way(config, family, bank_rows, num_entries, hardware)


def accumulate_s(
    num_entries: float,
    num_rows: int,
    width: int,
    num_groups: int,
    hardware: Hardware,
    *,
    gradient_bytes: int = GRADIENT_BYTES,
) -> float:
    """Seconds of `kernels.segment_accumulate` on a GPU: of the bytes that it moves, or of its instructions if they take
    longer.

    A row is read and written once, however many entries it has: fewer rows move where reads are skewed, and as
    many instructions are issued. An entry brings its row, its place in the order and a coefficient, which is a random
    read; its vector is in the cache.

    Args:
        num_entries: entries of rows that the rank has. Parts of a table's rows are read as the whole is: by Zipf's law
            too, every R-th row is as popular among its part as a row of that rank among R times as many.
        num_rows: rows that the rank has.
        width: columns on this rank.
        num_groups: groups of columns, each with a coefficient of its own.
        gradient_bytes: bytes per element of the gradient; 2 are rounded, which takes instructions.
    """
    rows = distinct_rows(num_entries, num_rows, hardware.row_skew)
    num_bytes = rows * 2 * moved_bytes(gradient_bytes * width) + num_entries * (_ORDER_BYTES + SECTOR_BYTES)
    instructions = num_entries * num_groups * accumulate_instructions(width // num_groups, rounded=gradient_bytes == 2)
    return max(num_bytes / hardware.gather_bytes_per_s, instructions / (hardware.issue_g_per_s * 1e9))


def moved_bytes(row_bytes: int, granule_bytes: int = GRANULE_BYTES) -> int:
    """Bytes of the granules that a row touches, on the average over the rows of a table."""
    return row_bytes + granule_bytes - math.gcd(row_bytes, granule_bytes)


@lru_cache(maxsize=4096)
def distinct_rows(num_entries: float, num_rows: int, skew: float) -> float:
    """Rows of a table that so many entries read, on the average, where the r-th most popular is read as r^-skew."""
    if skew == 0:
        return -num_rows * math.expm1(-num_entries / num_rows)
    return -sum(number * math.expm1(-num_entries * share) for number, share in popularity(num_rows, skew))


@lru_cache(maxsize=256)
def popularity(num_rows: int, skew: float) -> tuple[tuple[int, float], ...]:
    """Numbers of rows, and the share of reads of each of them. Ranks are taken together in intervals that grow by a
    twentieth."""
    edges = [0]
    while edges[-1] < num_rows:
        edges.append(min(num_rows, max(edges[-1] + 1, edges[-1] * 21 // 20)))
    intervals = [(high - low, ((low + 1 + high) / 2) ** -skew) for low, high in pairwise(edges)]
    total = sum(number * weight for number, weight in intervals)
    return tuple((number, weight / total) for number, weight in intervals)


@lru_cache(maxsize=4096)
def missed_share(num_rows: int, row_bytes: int, skew: float, cache_bytes: float = CACHED_BYTES) -> float:
    """Share of a table's reads whose rows come from device memory, and not from a cache that keeps those read last.

    Such a cache has what was read among its last t reads, of as many distinct rows as it has room for (H. Che et al.
    2002). With even reads all are taken to come from memory.
    """
    if skew == 0:
        return 1.0
    room = cache_bytes / row_bytes
    if room >= num_rows:
        return 0.0
    least, most = 0.0, 1.0
    while distinct_rows(most, num_rows, skew) < room:
        least, most = most, 2 * most
    for _ in range(40):
        middle = (least + most) / 2
        least, most = (middle, most) if distinct_rows(middle, num_rows, skew) < room else (least, middle)
    return sum(number * share * math.exp(-most * share) for number, share in popularity(num_rows, skew))
