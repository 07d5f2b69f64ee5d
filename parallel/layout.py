"""Placement of layers and ranks: the arithmetic of a layout, without any process group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megamem.config import ModelConfig


@dataclass(frozen=True)
class Unit:
    """Blocks first..last of which no chunk may hold a part only.

    They share a memory bank, or a memory reads at the first of them and adds after the last.
    """

    first: int
    last: int
    kind: Literal["group", "span"]


def unsplittable_units(model: ModelConfig) -> tuple[Unit, ...]:
    """Units that no edge of a chunk may cross, because tables and pending outputs do not travel between stages."""
    spans = model.memory_spans
    units = [Unit(span.read, span.add, "span") for span in spans if span.is_skip]
    for bank in model.memory_plan.banks:
        first, last = spans[bank.layers[0]].read, spans[bank.layers[-1]].read
        if last > first and not bank.on_every_stage:
            units.append(Unit(first, last, "group"))
    return tuple(units)


def crossed_units(units: Sequence[Unit], edges: Sequence[int]) -> tuple[Unit, ...]:
    """The units that reach over one of the edges; an edge is named by the block behind it."""
    return tuple(unit for unit in units if any(unit.first < edge <= unit.last for edge in edges))


def padded_size(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


def coefficients_per_rank(num_scores: int, num_ranks: int) -> int:
    """n: coefficients of a row that one rank needs for its columns, see `parallel.exchange.spread_coefficients`."""
    return num_scores // math.gcd(num_scores, num_ranks)


def bytes_per_id(num_ids: int) -> tuple[int, int]:
    """Whole bytes that ids below `num_ids` need, and whether half a byte more, see `parallel.packed_rows`."""
    half_bytes = max(1, -(-(num_ids - 1).bit_length() // 4))
    return divmod(half_bytes, 2)


def packed_bytes(ids: int, num_ids: int) -> int:
    """Bytes of so many packed ids below `num_ids`."""
    whole, odd = bytes_per_id(num_ids)
    return ids * whole + odd * -(-ids // 2)
