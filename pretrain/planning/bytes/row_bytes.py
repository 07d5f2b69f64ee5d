"""Bytes of gradients of tables that are the rows which a step reads (`optimizer.table_gradients: rows`).

Until the last backward pass of the step that updates tables a rank keeps what its lookups left (ids, coefficients, vectors),
of the steps before, too (`optimizer.tables_every`). Then it sorts the ids of each bank, and makes as many rows of sums as
there can be: of these entries, or of the table. On a CPU there are as many as were read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from kernels.common.device_bytes import ENTRIES_PER_JOINED_VECTOR, MOST_JOINED_ENTRIES
from kernels.common.ids import bytes_per_id
from megamem.config.memory import LookupShape, MemoryConfig
from parallel.layout import coefficients_per_rank
from pretrain.config.schedule import table_decay
from pretrain.config.schema import RunConfig
from pretrain.config.updates import keeps_files, keeps_rows
from pretrain.planning.counts.pipeline_stages import Division, FamilyInStage, Stage

_SUM = 4
_COUNT = 4
WINDOW_ELEMENTS = 1 << 25
"""Elements of sums of all replicas that are there at a time (`pretrain.engine.tables.replica_rows`)."""
_PLACES = 8 + 8
"""Bytes per row of sums: its number in the table, and the sum that belongs to it."""
_PLACE = 4
"""Bytes of the place of a replica's row among those of all."""
_PER_FETCHED_ROW = 8 + 2 * 4 + 2 * 8
"""Bytes per row of a step that is fetched from files: its number, its state, and its places in two steps."""
_PER_SORTED_ID = 4 + 4 + 8 + (8 + 4 + 8)
"""Bytes per id while ids are sorted: the ids as keys, sorted, their order, and a radix sort's positions and buffers."""


def has_read_rows(config: RunConfig) -> bool:
    """True if gradients of tables are rows that were read."""
    return config.model.memory is not None and keeps_rows(config.optimizer)


def lies_in_files(config: RunConfig, memory: MemoryConfig) -> bool:
    """True if a family's tables lie in files (`optimizer.table_folder`)."""
    return keeps_files(config.optimizer) and memory.rows_are_known


def has_files(config: RunConfig) -> bool:
    """True if any tables do."""
    return any(lies_in_files(config, memory) for memory in config.model.memories)


def has_scales(config: RunConfig) -> bool:
    """True if tables have a scale, by which a weight decay reaches rows that a step does not read."""
    return has_read_rows(config) and table_decay(config.optimizer) > 0 and config.optimizer.row_clock == "updates"


def scaled_bytes(config: RunConfig, memory: MemoryConfig, tokens: int, *, backward: bool) -> float:
    """Bytes that a rank moves to multiply what a lookup of so many tokens has gathered by the scales of tables.

    Forward those are sums of values and products of pre-values, backward gradients of what weights the ones, and of inputs of
    the others.
    """
    if not has_scales(config):
        return 0.0
    lookup, columns, has_pre_values = memory.lookup, config.parallel.memory_columns, bool(memory.width("pre_values"))
    if backward:
        weights = lookup.rows * coefficients_per_rank(lookup.scores, columns)
        elements = weights * lookup.learns_scores + memory.width("pre_values") / columns
    else:
        elements = lookup.bins * memory.width("values") / columns + lookup.rows * has_pre_values
    return 2 * config.train.element_bytes * tokens * elements


def fetched_bytes(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes of the rows of a step and of the next one, on the device, where tables lie in files. One of them may update the
    tables, and has the rows of the steps that wait, too."""
    of_one_step = replace(division, table_microbatches=division.num_microbatches)
    # Each replica updates the rows of all, and fetches those that its layers may choose.
    return sum(
        rows * (memory.row_width / config.parallel.memory_columns * config.train.element_bytes + _PER_FETCHED_ROW)
        for steps in (division, of_one_step)
        for family in stage.families
        if lies_in_files(config, memory := family.memory)
        for rows in _most_rows_of_banks(config, stage, steps, family, division.table_replicas, known=True)
    )


def most_rows(config: RunConfig, stage: Stage, division: Division) -> float:
    """Rows of all banks, on a rank, that a step can read at the most."""
    return sum(number for _, number in most_rows_of_families(config, stage, division))


def most_rows_of_families(
    config: RunConfig, stage: Stage, division: Division, *, num_replicas: int = 1
) -> Iterator[tuple[MemoryConfig, float]]:
    """Rows of all banks, on a rank, that a step can read at the most, by family.

    Args:
        num_replicas: replicas of a part of a table, that read its rows together.
    """
    for family in stage.families:
        yield family.memory, sum(_most_rows_of_banks(config, stage, division, family, num_replicas))


def _most_rows_of_banks(
    config: RunConfig,
    stage: Stage,
    division: Division,
    family: FamilyInStage,
    num_replicas: int,
    *,
    known: bool = False,
) -> Iterator[float]:
    """Rows on a rank that a step can read at the most of each bank of a family; `known`: among which it can choose."""
    layout, memory = config.parallel, family.memory
    per_token = memory.known_rows if known else memory.lookup.rows
    entries = layout.memory * division.rank_tokens * per_token * division.table_microbatches
    is_same = _has_copies(stage, family) and (known or not memory.chooses_among_rows)
    for rows, lookups in lookups_of_banks(stage, family):
        # All layers read the same rows of a bank that every stage holds, or choose among them.
        different = 1 if is_same else lookups
        yield min(entries * num_replicas * different, rows / layout.memory_rows)


def read_elements(config: RunConfig, stage: Stage, division: Division, *, num_replicas: int = 1) -> float:
    """Elements of those rows in all tables, on a rank."""
    by_family = most_rows_of_families(config, stage, division, num_replicas=num_replicas)
    return sum(rows * memory.row_width / config.parallel.memory_columns for memory, rows in by_family)


def updated_elements(config: RunConfig, stage: Stage, division: Division) -> float:
    """Elements of the rows that a step can update at the most: those that all replicas read, on each of them."""
    return read_elements(config, stage, division, num_replicas=division.table_replicas)


def copied_elements_read(config: RunConfig, stage: Stage, division: Division) -> float:
    """Elements of the rows that a replica reads of banks of which every stage has a copy: the same rows on all stages."""
    return sum(
        number * family.memory.row_width / config.parallel.memory_columns
        for family in stage.families
        if _has_copies(stage, family)
        for number in _most_rows_of_banks(config, stage, division, family, 1)
    )


def replica_bytes(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes that a rank sends so that the replicas of a part of a table have the sums of all: its rows' numbers, and theirs, and
    reads if these choose the rows that are trained."""
    if not has_read_rows(config):
        return 0.0
    largest = max((bank.num_rows for bank in stage.trained_banks), default=0) / config.parallel.memory_rows
    per_row = bytes_per_id(int(largest) + 1) + _COUNT * chooses_by_step(config)
    numbers = per_row * most_rows(config, stage, division)
    return (division.table_replicas - 1) * (numbers + _SUM * read_elements(config, stage, division))


def chooses_by_step(config: RunConfig) -> bool:
    """True if a step chooses the rows that are trained (`optimizer.trained_rows`)."""
    rows = config.optimizer.trained_rows
    return rows is not None and rows.chooses_by_step


def kept_bytes(stage: Stage, division: Division, by_lookup: float) -> float:
    """Bytes that the operands of table gradients take until a step's last backward pass, beside what that one keeps itself.

    Args:
        by_lookup: bytes of one lookup's.
    """
    return (division.table_microbatches - 1) * stage.num_backward_lookups * by_lookup


def adding_bytes(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes on the common stream when lookups are added up, after that pass: of the sums, and of a bank's sorted ids."""
    sums = _SUM * read_elements(config, stage, division) + _PLACES * most_rows(config, stage, division)
    ids = division.table_microbatches * _most_ids_of_a_bank(config, stage, division)
    own = sums + max(_PER_SORTED_ID * ids, _PLACE * ids + _joined_bytes(config, stage, division))
    if division.table_replicas == 1:
        return own
    # Those of all replicas, beside a replica's own and what is there to sort theirs, or a window of what others send.
    size = division.table_replicas
    rows = sum(number for _, number in most_rows_of_families(config, stage, division, num_replicas=size))
    of_bank = size * _most_rows_of_a_bank(config, stage, division)
    window = _SUM * min(size * read_elements(config, stage, division), WINDOW_ELEMENTS) * (1 + 1 / size)
    sent = max(of_bank * _PER_SORTED_ID, window) + _PLACE * size * most_rows(config, stage, division)
    return max(own, sums + _SUM * updated_elements(config, stage, division) + _PLACES * rows + sent)


def most_joined(lookup: LookupShape, num_entries: float, num_lookups: float) -> float:
    """Lookups of a bank, of so many entries each, that can be one (`kernels.common.joined_lookups`)."""
    if not vectors_are_joined(lookup):
        return 1
    return max(1, min(num_lookups, MOST_JOINED_ENTRIES // num_entries))


def vectors_are_joined(lookup: LookupShape) -> bool:
    """Tell whether as many entries share a vector as joining lookups wants."""
    return lookup.rows >= ENTRIES_PER_JOINED_VECTOR * lookup.bins


def _joined_bytes(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes while lookups of a table are added up as one: their operands side by side, and the sort of their places; 0 where
    each is added up alone."""
    layout, element = config.parallel, config.train.element_bytes
    most = 0.0
    for family in stage.families:
        lookup, width = family.memory.lookup, family.memory.width("values")
        entries = layout.memory * division.rank_tokens * lookup.rows
        for _, lookups in lookups_of_banks(stage, family):
            number = most_joined(lookup, entries, lookups * division.table_microbatches)
            if number == 1:
                continue
            coefficients = coefficients_per_rank(lookup.scores, layout.memory_columns) * element
            operands = entries * (_PLACE + coefficients)
            operands += layout.memory_rows * division.rank_tokens * lookup.bins * width * element
            most = max(most, number * (operands + entries * _PER_SORTED_ID))
    return most


def _most_rows_of_a_bank(config: RunConfig, stage: Stage, division: Division) -> float:
    """Rows that a replica can read of the bank that most are read of."""
    of_banks = (_most_rows_of_banks(config, stage, division, family, 1) for family in stage.families)
    return max(chain.from_iterable(of_banks), default=0.0)


def _most_ids_of_a_bank(config: RunConfig, stage: Stage, division: Division) -> float:
    """Ids of a microbatch's lookups in the bank that most of them read."""
    reads = [
        lookups * family.memory.lookup.rows
        for family in stage.families
        for _, lookups in lookups_of_banks(stage, family)
    ]
    return max(reads, default=0.0) * config.parallel.memory * division.rank_tokens


def _has_copies(stage: Stage, family: FamilyInStage) -> bool:
    """True if every stage holds the trained bank of a family."""
    return any(bank.on_every_stage for bank in stage.trained_banks if bank.memory.kind == family.memory.kind)


def lookups_of_banks(stage: Stage, family: FamilyInStage) -> list[tuple[int, float]]:
    """A family's trained banks: rows of each, and the lookups per microbatch, of banks of as many rows the mean."""
    banks = [bank.num_rows for bank in stage.trained_banks if bank.memory.kind == family.memory.kind]
    return [(rows, family.backward_lookups.count(rows) / banks.count(rows)) for rows in banks]
