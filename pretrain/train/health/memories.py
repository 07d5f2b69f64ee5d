"""Memories that have dropped out of a model: their keys collapse, or their output falls silent.

Judged by what `megamem.layers.usage` observes, over the last few observed steps, as single ones scatter. It imports no torch:
whatever shows a run asks here, so that all of them say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, TypeAlias

NUM_OBSERVED = 3
"""Observed steps that a memory is judged by."""
COLLAPSED = 0.22
"""Coverage over that of as many even reads, below which keys have collapsed: 20 % of the rows where even reads would
cover 91 %, as in the quickstart (docs/recipe.md)."""
SILENT = 0.01
"""Deviation of a memory's output over that of the loudest one, below which it is silent."""

Kind: TypeAlias = Literal["collapsed keys", "silent memory"]
BlockFigures: TypeAlias = Mapping[int, Mapping[str, Sequence[float]]]
"""Values by block and figure, in the order of the steps."""

_ADVICE: Mapping[Kind, str] = {
    "collapsed keys": "raise model.memory.key_balance_weight tenfold",
    "silent memory": "it does not come back by itself: let it read with an earlier block's stream "
    "(model.memory.placement.query_group), or have fewer memories that read more (placement.blocks, top_k)",
}


@dataclass(frozen=True)
class MemoryFault:
    """Fault in the memory of a block.

    Attributes:
        kind: name of the fault.
        block: its number, from 0.
        share: share of its rows that a step reads; or of the loudest memory's output.
        of: share of the rows that as many even reads would cover; or the number of the loudest memory's block.
    """

    kind: Kind
    block: int
    share: float
    of: float


def figures_by_block(observed: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[int, dict[str, list[float]]]:
    """The figures of memories in rows of metrics, by block; those that were not finite are left out."""
    found: dict[int, dict[str, list[float]]] = {}
    for memories in observed:
        for block, figures in memories.items():
            for name, value in figures.items():
                if isinstance(value, float | int):
                    found.setdefault(int(block), {}).setdefault(name, []).append(value)
    return found


def find_faults(of_blocks: BlockFigures) -> list[MemoryFault]:
    """Memories that have dropped out, by the last observed steps; none before there are `NUM_OBSERVED` of them."""
    recent = {
        block: {name: fmean(values[-NUM_OBSERVED:]) for name, values in figures.items() if len(values) >= NUM_OBSERVED}
        for block, figures in sorted(of_blocks.items())
    }
    found = []
    for block, figures in recent.items():
        # Memories whose rows the token chooses have no such figure.
        if (even := figures.get("even_coverage")) is not None and figures["coverage"] < COLLAPSED * even:
            found.append(MemoryFault("collapsed keys", block, figures["coverage"], even))
    outputs = {block: figures["output_std"] for block, figures in recent.items() if "output_std" in figures}
    if outputs:
        loudest = max(outputs, key=outputs.__getitem__)
        found += [
            MemoryFault("silent memory", block, output / outputs[loudest], loudest)
            for block, output in outputs.items()
            if output < SILENT * outputs[loudest]
        ]
    return found


def describe_faults(found: Sequence[MemoryFault]) -> dict[Kind, str]:
    """A sentence for each kind of what was found, with its figures and what to do."""
    words: dict[Kind, str] = {}
    for kind in dict.fromkeys(finding.kind for finding in found):
        alike = [finding for finding in found if finding.kind == kind]
        several = len(alike) > 1
        blocks = f"block{'s' if several else ''} {', '.join(str(finding.block) for finding in alike)} (counted from 0)"
        low, high = min(finding.share for finding in alike), max(finding.share for finding in alike)
        if kind == "collapsed keys":
            share = f"{low:.0%} to {high:.0%}" if several else f"{low:.0%}"
            even = min(finding.of for finding in alike)
            what = f"the keys of {blocks} have collapsed: a step reads {share} of the rows, where even reads would cover {even:.0%}"
        elif several:
            what = f"the memories of {blocks} are silent: they add at most {high:.1g} of what block {alike[0].of:.0f}'s adds"
        else:
            what = f"the memory of {blocks} is silent: it adds {high:.1g} of what block {alike[0].of:.0f}'s adds"
        words[kind] = f"{what}. What to do: {_ADVICE[kind]}; docs/recipe.md says more"
    return words
