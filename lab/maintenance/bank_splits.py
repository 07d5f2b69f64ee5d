"""A bank split over its memory group by columns, by rows and by both, counted by the formulas of plans.

`python -m lab.maintenance.bank_splits passes` counts one layer's lookup, `steps` the fastest layouts, `balance` how
evenly popular rows fall on the ranks that hold them. Built is what sends entries to all (`parallel.memory_rows`);
docs/decisions.md has what was decided.

A rank of a split by both holds one of G / R parts of the columns, of one of R parts of the rows. It gives every token of
the group one partial sum over the rows that it has.

Legend: G ranks of the memory group, R parts of rows, T tokens of a rank, J rows read per token, V value dim, P pre-value
dim, e bytes per element.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch

from kernels.shuffled_rows.naive import shuffled_rows
from lab.maintenance.plan_page import CONFIGS, GPU, GPUS, MODELS, Row, markdown_table
from megamem.shuffle import KeyedShuffle
from parallel.layout import coefficients_per_rank
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.planning.costs import timing
from pretrain.planning.costs.activations import in_flight
from pretrain.planning.costs.hardware import Hardware, load_hardware
from pretrain.planning.costs.layouts import Estimate, estimates_of, possible_layouts
from pretrain.planning.costs.rows import BUSIEST, CACHED_BYTES, RowSeconds, moved_bytes, row_seconds
from pretrain.planning.costs.stages import Division, Stage, stages_of
from pretrain.planning.costs.traffic import WayBytes, lookup_traffic

SKEWS = (0.0, 0.8)
MOST_RANKS = 32
"""Ranks of the largest group that is counted."""
_TOKENS = 8192
_SPARE = 1.1
"""Entries that one rank can send to another if it sends them to their owners alone, over their mean."""
_PLACE_BYTES = 2
"""The token of an entry that is sent to its owner alone."""
_SHUFFLES = 6


@dataclass(frozen=True)
class Split:
    """A way to split a bank over its group.

    Attributes:
        name: of a line.
        row_parts: R, as far as the group has so many ranks; 0: as many as it has.
        to_owners: send an entry to the ranks that have its row, in room for `_SPARE` times the mean; else to all, which
            pass over what they do not have.
    """

    name: str
    row_parts: int = 1
    to_owners: bool = False

    def parts_of(self, group: int) -> int:
        """R in a group of so many ranks."""
        return math.gcd(group, self.row_parts)


SPLITS = (
    Split("columns"),
    Split("rows", 0),
    Split("rows, to owners", 0, to_owners=True),
    Split("both, 2 of rows", 2),
    Split("both, 4 of rows", 4),
    Split("both, 4 of rows, to owners", 4, to_owners=True),
)


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends to each other one of its group.

    Attributes:
        same: the same bytes to all.
        own: other bytes to each.
    """

    same: float
    own: float

    def to_others(self, group: int, hardware: Hardware) -> tuple[float, float]:
        """Bytes within the node and to other nodes: what all are sent is passed on by a ring, as in a plan."""
        in_node = min(group, hardware.gpus_per_node)
        near, far = in_node - 1, group - in_node
        crossing = self.same * (group - 1) / in_node if far else 0.0
        return self.own * near + self.same * (group - 1) - crossing, self.own * far + crossing

    def seconds(self, config: RunConfig, hardware: Hardware) -> float:
        """Seconds, as a plan has them."""
        others = config.parallel.memory - 1
        return timing.way_s(WayBytes(round(others * self.same), round(others * self.own)), config, hardware)


def reading(stage: Stage, lookups: Sequence[int], backward_lookups: Sequence[int]) -> Stage:
    """The stage of one family with other lookups (`pretrain.planning.costs.stages.FamilyInStage`)."""
    (family,) = stage.families
    return replace(stage, families=(replace(family, lookups=tuple(lookups), backward_lookups=tuple(backward_lookups)),))


def _lookups(stage: Stage) -> tuple[int, ...]:
    (family,) = stage.families
    return family.lookups


def _backward_lookups(stage: Stage) -> tuple[int, ...]:
    (family,) = stage.families
    return family.backward_lookups


def sent(config: RunConfig, split: Split, bank_rows: int, tokens: int) -> tuple[Sent, Sent]:
    """Bytes of one lookup's messages, forward and backward."""
    memory, group, element = config.model.memory, config.parallel.memory, config.train.element_bytes
    assert memory is not None
    parts = split.parts_of(group)
    columns, share = group // parts, _SPARE / parts if split.to_owners and parts > 1 else 1.0
    whole = lookup_traffic(memory, bank_rows, group_size=group, num_tokens=tokens, element_bytes=element)
    entries = share * tokens * memory.lookup.rows
    ids = share * whole.rows / (group - 1)
    has_products = memory.width("pre_values") and columns > 1
    products = entries * element if has_products else 0.0
    coefficients = entries * coefficients_per_rank(memory.lookup.scores, columns) * element
    vectors = tokens * element * sum(table.width // columns for table in memory.tables)
    if share < 1:
        own = products + coefficients + vectors
        return Sent(0, own + ids + _PLACE_BYTES * entries), Sent(0, own)
    if parts == 1:
        return Sent(ids, products + coefficients + vectors), Sent(products, coefficients + vectors)
    # Every part of the rows wants the same scores: all of them go to all ranks.
    scores = entries * memory.lookup.scores * element
    return Sent(ids + scores, products + vectors), Sent(products, coefficients + vectors)


def rows_s(config: RunConfig, split: Split, stage: Stage, tokens: int, hardware: Hardware) -> RowSeconds:
    """Seconds of a stage's lookups of a microbatch, see `row_seconds`.

    A rank's gathers and gradients are those of a group of G / R ranks with a bank of 1 / R of the rows. The vectors of
    all tokens, R times as many bytes as with columns, leave the cache, and are copied for the exchange.
    """
    memory, group, element = config.model.memory, config.parallel.memory, config.train.element_bytes
    every = row_seconds(config, stage, tokens, hardware)
    parts = split.parts_of(group)
    if memory is None or group == 1:
        return every
    columns = group // parts
    busiest = BUSIEST[parts] if hardware.row_skew else 1.0
    owned_stage = reading(
        stage, [rows // parts for rows in _lookups(stage)], [rows // parts for rows in _backward_lookups(stage)]
    )
    owned = row_seconds(_grouped(config, columns), owned_stage, tokens, hardware)
    missed = copied = 0.0
    for table in memory.tables:
        width = table.width // columns * element
        misses = max(0.0, 1 - CACHED_BYTES / (group * tokens * width))
        missed += columns * tokens * memory.lookup.rows * moved_bytes(width) * misses
        # Written, cut or added up, sent and received.
        copied += 4 * (parts - 1) * tokens * table.width * element
    passes, backward = stage.num_lookups + stage.num_backward_lookups, stage.num_backward_lookups
    of_owners = split.to_owners and parts > 1
    return RowSeconds(
        gathers=busiest * owned.gathers,
        ids=(busiest * owned.ids if of_owners else every.ids) + passes * copied / hardware.stream_bytes_per_s,
        sort=busiest * owned.sort if of_owners else every.sort,
        gradients=busiest * owned.gradients + backward * busiest * missed / hardware.gather_bytes_per_s,
    )


def exchange_s(
    config: RunConfig, split: Split, stage: Stage, division: Division, hardware: Hardware
) -> tuple[float, float]:
    """Exposed seconds of the exchanges of a microbatch, forward and backward, as `pretrain.planning.costs.timing` hides them."""

    def seconds_of_ways() -> tuple[float, float]:
        forward, backward = 0.0, 0.0
        again = config.train.recompute == "full"
        for rows, number in Counter(_lookups(stage)).items():
            forward += number * sent(config, split, rows, division.rank_tokens)[0].seconds(config, hardware)
        for rows, number in Counter(_backward_lookups(stage)).items():
            ways = [way.seconds(config, hardware) for way in sent(config, split, rows, division.rank_tokens)]
            forward, backward = forward + again * number * ways[0], backward + number * ways[1]
        return forward, backward

    with mock.patch.object(timing, "exchange_s_of_ways", return_value=seconds_of_ways()):
        return timing._exposed_exchange_s(config, stage, division, hardware)


def _grouped(config: RunConfig, group: int, row_parts: int = 1) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, memory=group, memory_rows=row_parts))


def estimates(config: RunConfig, split: Split, num_gpus: int, hardware: Hardware) -> list[Estimate]:
    """Every layout that fits with a bank split so, with groups of up to `MOST_RANKS`; the fastest first."""
    exposed = timing._exposed_exchange_s

    def exchange(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> tuple[float, float]:
        if config.parallel.memory == 1:
            return 0.0, 0.0
        with mock.patch.object(timing, "_exposed_exchange_s", exposed):
            return exchange_s(config, split, stage, division, hardware)

    def rows(config: RunConfig, stage: Stage, tokens: int, hardware: Hardware) -> RowSeconds:
        return rows_s(config, split, stage, tokens, hardware)

    with (
        mock.patch.object(timing, "row_seconds", rows),
        mock.patch.object(timing, "_exposed_exchange_s", exchange),
    ):
        found = [
            replace(each, counted_bytes=each.predicted_bytes + _kept(each, split, num_gpus))
            for layout in possible_layouts(config, num_gpus, hardware)
            if layout.parallel.memory <= MOST_RANKS
            for each in estimates_of(layout, num_gpus, hardware)
        ]
    return sorted((each for each in found if each.fits(hardware)), key=lambda each: each.time.total_s)


def _kept(each: Estimate, split: Split, num_gpus: int) -> float:
    """Bytes of projected inputs that backward needs of other ranks, beyond those of columns."""
    config, memory = each.config, each.config.model.memory
    assert memory is not None
    parts, division = split.parts_of(config.parallel.memory), Division.of(config, num_gpus)
    stage = stages_of(config)[each.fullest_stage]
    flights = in_flight(config, each.fullest_stage, division) / config.parallel.virtual_pipeline
    lookups = 1 if config.train.recompute == "full" else flights * stage.num_backward_lookups
    width = memory.width("pre_values") * config.train.element_bytes
    return (parts - 1) * lookups * division.rank_tokens * width


def passes(config: RunConfig, hardware: Hardware) -> Iterator[Row]:
    """Lines of one layer's lookup, forward and backward, of `_TOKENS` tokens of a rank."""
    yield (
        *("reads", "G", "split", "rows of bytes", "entries, M", "gathers, ms", "ids, ms", "table gradients, ms"),
        *("sent, KB per token", "to other nodes", "exchange, ms", "one after the other, ms"),
    )
    memory = config.model.memory
    assert memory is not None
    for skew in SKEWS:
        skewed = replace(hardware, row_skew=skew)
        for group in (4, 8, 16, 32):
            grouped = replace(_grouped(config, group), train=replace(config.train, recompute="none"))
            (bank_rows, *_) = _lookups(stages_of(grouped)[0])
            stage = reading(stages_of(grouped)[0], [bank_rows], [bank_rows])
            for split in SPLITS:
                parts = split.parts_of(group)
                columns = group // parts
                seconds = rows_s(grouped, split, stage, _TOKENS, skewed)
                ways = sent(grouped, split, bank_rows, _TOKENS)
                near, far = (sum(both) for both in zip(*(way.to_others(group, skewed) for way in ways), strict=True))
                link = sum(way.seconds(grouped, skewed) for way in ways)
                widths = " + ".join(str(table.width // columns * config.train.element_bytes) for table in memory.tables)
                ids = seconds.ids + seconds.sort
                total = seconds.gathers + ids + seconds.gradients + link
                busiest = BUSIEST[parts] if skew else 1.0
                yield (
                    *(f"Zipf {skew:g}" if skew else "even", str(group), split.name, widths),
                    f"{busiest * columns * _TOKENS * memory.lookup.rows / 1e6:.1f}",
                    *(f"{1e3 * part:.1f}" for part in (seconds.gathers, ids, seconds.gradients)),
                    *(f"{part / _TOKENS / 1e3:.1f}" for part in (near + far, far)),
                    *(f"{1e3 * link:.1f}", f"{1e3 * total:.1f}"),
                )


def steps(config: RunConfig, hardware: Hardware) -> Iterator[Row]:
    """Lines of the fastest layouts."""
    yield "split", *(f"{num} GPUs, {'Zipf 0.8' if skew else 'even'}" for num in GPUS for skew in SKEWS)
    for split in SPLITS:
        cells = []
        for num_gpus in GPUS:
            for skew in SKEWS:
                best = estimates(config, split, num_gpus, replace(hardware, row_skew=skew))[0]
                layout = best.config.parallel
                parts = split.parts_of(layout.memory)
                cells.append(f"{best.time.total_s:.2f} (PP {layout.pipeline}, {layout.memory // parts} x {parts})")
        yield split.name, *cells


def balance(config: RunConfig) -> Iterator[Row]:
    """Lines of the busiest part of the rows, over the mean: the mean and the worst of some layers' shuffles.

    An entry of the grid is as popular as its number is small, and is read at most once by a token.
    """
    yield "parts of rows", "mean", "worst"
    memory = config.model.memory
    assert memory is not None
    view, bank = config.model.memory_plan.views[0], config.model.memory_plan.banks[0]
    rates = reads_per_token(view.num_rows, memory.lookup.rows, SKEWS[-1])
    entries = torch.arange(view.num_rows)
    busiest: dict[int, list[float]] = {parts: [] for parts in BUSIEST}
    for layer in range(_SHUFFLES):
        keys = KeyedShuffle(view.num_keys, seed=0, name=f"layer {layer}").round_keys
        rows, _ = shuffled_rows(entries, view.num_keys, keys, view.num_rows, view.first_row, bank.num_rows)
        for parts, found in busiest.items():
            loads = np.bincount(rows.numpy() // (bank.num_rows // parts), weights=rates, minlength=parts)
            found.append(float(loads.max() / loads.mean()))
    for parts, found in busiest.items():
        yield str(parts), f"{np.mean(found):.3f}", f"{max(found):.3f}"


def reads_per_token(num_entries: int, num_reads: int, skew: float) -> np.ndarray:
    """Reads of each entry by a token, on the average: by Zipf's law, but none more than once."""
    rates = np.arange(1, num_entries + 1, dtype=np.float64) ** -skew
    rates *= num_reads / rates.sum()
    while (rates > 1).any():
        often = rates >= 1
        rates[often] = 1
        rates[~often] *= (num_reads - often.sum()) / rates[~often].sum()
    return rates


def main(arguments: Sequence[str]) -> None:
    config, hardware = load_config(CONFIGS / MODELS["2.5B/120B-top256"]), load_hardware(GPU)
    tables = {
        "passes": lambda: passes(config, hardware),
        "steps": lambda: steps(config, hardware),
        "balance": lambda: balance(config),
    }
    for name in arguments or tables:
        print(*markdown_table(tables[name]()), sep="\n")
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
