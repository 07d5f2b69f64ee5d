"""Lookups of a microbatch whose gradients of tables are added up as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megamem.config.memory import LookupShape
from pretrain.config.overlap import memory_runs_beside
from pretrain.config.schema import RunConfig
from pretrain.config.updates import keeps_rows
from pretrain.planning.bytes.row_bytes import lookups_of_banks, most_joined
from pretrain.planning.counts.pipeline_stages import FamilyInStage, Stage


def num_additions(config: RunConfig, stage: Stage, tokens: int) -> float:
    """Times that a microbatch's lookups are sorted and added up, with `tokens` on a rank."""
    return sum(
        number / together
        for family in stage.families
        for _, number, together in lookups_in_backward(config, stage, family, tokens)
    )


def lookups_in_backward(
    config: RunConfig, stage: Stage, family: FamilyInStage, tokens: int
) -> Iterator[tuple[int, int, float]]:
    """Rows of a family's banks, lookups of banks of as many rows, and how many of a bank's are added up as one."""
    num_entries, of_banks = entries_of_lookup(config, family, tokens), dict(lookups_of_banks(stage, family))
    for bank_rows, number in Counter(family.backward_lookups).items():
        yield (
            bank_rows,
            number,
            added_together(config, family.memory.lookup, num_entries, of_banks.get(bank_rows, number)),
        )


def entries_of_lookup(config: RunConfig, family: FamilyInStage, tokens: int) -> int:
    """Entries M of a lookup, with `tokens` on a rank."""
    return config.parallel.memory * tokens * family.memory.lookup.rows


def added_together(config: RunConfig, lookup: LookupShape, num_entries: int, num_lookups: float) -> float:
    """Lookups of a bank that are added up as one.

    Args:
        lookup: reads of a token.
        num_entries: entries of a lookup.
        num_lookups: lookups of the bank in a backward pass over a microbatch.
    """
    if not keeps_rows(config.optimizer) and (memory_runs_beside(config) or config.train.recompute == "full"):
        return 1
    return most_joined(lookup, num_entries, num_lookups)
