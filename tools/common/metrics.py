"""A run's own record: the rows of `metrics.jsonl`, and the curves in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from pretrain.run.metric_rows import read_rows
from pretrain.train.health.memories import MemoryFault, figures_by_block, find_faults

Point: TypeAlias = tuple[float, float]


def read_metrics(metrics: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`; none if there is no such file. Bad ones are named and left out."""
    return read_rows(metrics, step=int)


@dataclass(frozen=True)
class Curves:
    """A run's course. All points are (tokens seen, value).

    Attributes:
        training: losses of the steps' batches, in nats per token.
        validation: losses of the evaluations.
        coverage: shares of the table's rows that an observed step read, by block with a memory.
        kl_to_uniform: distances of the reads of such a step from even ones, in nats, by block.
        bits_per_byte: bits per byte of the last evaluation; None without one.
        even_coverage: shares that as many even reads would cover, by block; none where the token chooses the rows.
        dropped_out: the memories whose keys have collapsed, or that are silent, at the end.
    """

    training: tuple[Point, ...]
    validation: tuple[Point, ...]
    coverage: dict[int, tuple[Point, ...]]
    kl_to_uniform: dict[int, tuple[Point, ...]]
    bits_per_byte: float | None
    even_coverage: dict[int, tuple[Point, ...]] = field(default_factory=dict)
    dropped_out: tuple[MemoryFault, ...] = ()


def curves(rows: Sequence[dict[str, Any]]) -> Curves:
    """The curves in the rows of a run, in their order. An evaluation has seen the tokens of the last step before it."""
    tokens = 0.0
    training: list[Point] = []
    validation: list[Point] = []
    usage: dict[str, dict[int, list[Point]]] = {"coverage": {}, "kl_to_uniform": {}, "even_coverage": {}}
    bits_per_byte = None
    for row in rows:
        tokens = row.get("consumed_tokens", tokens)
        if row.get("loss") is not None:
            training.append((tokens, row["loss"]))
        if row.get("validation_loss") is not None:
            validation.append((tokens, row["validation_loss"]))
            bits_per_byte = row["bits_per_byte"]
        for block, figures in row.get("memory", {}).items():
            for name, of_blocks in usage.items():
                if name in figures:
                    of_blocks.setdefault(int(block), []).append((tokens, figures[name]))
    coverage, kl_to_uniform, even_coverage = (
        {block: tuple(points) for block, points in sorted(of_blocks.items())} for of_blocks in usage.values()
    )
    dropped_out = find_faults(figures_by_block(row["memory"] for row in rows if "memory" in row))
    return Curves(
        tuple(training), tuple(validation), coverage, kl_to_uniform, bits_per_byte, even_coverage, tuple(dropped_out)
    )


def binned(points: Sequence[Point], num_bins: int, end: float | None = None) -> tuple[Point, ...]:
    """Means of the points in equal ranges of tokens, which smooths a noisy curve.

    Args:
        num_bins: ranges from 0 to `end`.
        end: tokens at which the last range ends; None: where the points end.
    """
    end = max((x for x, _ in points), default=0.0) if end is None else end
    return means(points, lambda tokens: math.ceil(tokens / end * num_bins))


def means(points: Sequence[Point], group: Callable[[float], float] = lambda tokens: tokens) -> tuple[Point, ...]:
    """The mean of each group of points; which one a point is in follows from its tokens."""
    groups: dict[float, list[Point]] = {}
    for point in points:
        groups.setdefault(group(point[0]), []).append(point)
    return tuple((fmean(x for x, _ in held), fmean(y for _, y in held)) for _, held in sorted(groups.items()))
