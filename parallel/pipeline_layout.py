"""Blocks, and embedding or loss, of every model chunk: equal parts of the depth, or as a text says.

A layout is written as Megatron writes it, one part per chunk in the order of the depth, divided by `|`: `E` is the
embedding, `t` a block, `L` the final norm, output projection and loss; `x*3` repeats a character and `(..)*3` a group.
So `Et|(t*3|)*2tL` gives 1, 3, 3 and 1 blocks to four chunks. On P stages, stage p holds the chunks p, P + p, 2P + p,
... Blocks count from 0.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megamem.placement.block_plan import UncutBlocks

_KEY = "parallel.pipeline_layout"
# More than any model has layers; keeps a slip from filling the memory.
_MOST_REPEATS = 1_000
_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_CHARACTER = re.compile(r"([EtL|])\*(\d+)")


@dataclass(frozen=True)
class ModelChunk:
    """Contents of one chunk: global 0-based blocks, and whether it has the embedding or the loss."""

    layers: range
    has_embedding: bool
    has_loss: bool


def model_chunks(
    num_layers: int, *, pipeline: int, virtual_pipeline: int, layout: str | None
) -> tuple[ModelChunk, ...]:
    """The chunks of a model in the order of the depth.

    Args:
        num_layers: blocks of the model; without a layout, divisible by pipeline x virtual_pipeline.
        pipeline: stages.
        virtual_pipeline: chunks per stage.
        layout: None for equal parts.

    Raises:
        ValueError: the text is malformed, or does not fit the model or the number of chunks.
    """
    count = pipeline * virtual_pipeline
    if layout is None:
        per_chunk = num_layers // count
        return _chunks([index * per_chunk for index in range(1, count)], num_layers)
    chunks = parse_layout(layout, num_layers)
    if len(chunks) != count:
        whole = len(chunks) % pipeline == 0
        fix = f"set parallel.virtual_pipeline: {len(chunks) // pipeline}, or " if whole else ""
        raise ValueError(
            f"{_KEY} is {layout!r}, which has {len(chunks)} parts, but parallel.pipeline {pipeline} x virtual_pipeline "
            f"{virtual_pipeline} makes {count} chunks: {fix}write {count} parts divided by |"
        )
    return chunks


def chunks_of_stage(chunks: Sequence[ModelChunk], *, pipeline: int, pipeline_rank: int) -> tuple[ModelChunk, ...]:
    """The chunks that one of `pipeline` stages holds, in the order of its virtual stages."""
    return tuple(chunks[pipeline_rank::pipeline])


def parse_layout(text: str, num_layers: int) -> tuple[ModelChunk, ...]:
    """The chunks that a text describes. Spaces, line breaks and commas mean nothing.

    Raises:
        ValueError: the text is malformed, a part is empty, or its blocks are not `num_layers`.
    """
    said = f"{_KEY} is {text!r}"
    plain = _unrolled(re.sub(r"[\s,]", "", text), said)
    whole = plain.replace("|", "")
    if not re.fullmatch(r"Et*L", whole):
        raise ValueError(
            f"{said}: it must begin with E (the embedding), hold t for every block, and end with L (the loss), "
            "in parts divided by |, as in Et|tt|tL"
        )
    if len(whole) - 2 != num_layers:
        raise ValueError(f"{said}, which holds {len(whole) - 2} blocks, but model.num_layers is {num_layers}")
    parts = plain.split("|")
    if "" in parts:
        raise ValueError(
            f"{said}, where part {parts.index('') + 1} of {len(parts)} is empty: give it a block, or take it out"
        )
    return _chunks(list(itertools.accumulate(part.count("t") for part in parts))[:-1], num_layers)


def _unrolled(text: str, said: str) -> str:
    def repeat(match: re.Match[str]) -> str:
        count = int(match[2])
        if not 0 < count <= _MOST_REPEATS:
            raise ValueError(f"{said}, where {match[0]} repeats {count} times: use 1 to {_MOST_REPEATS}")
        return match[1] * count

    plain = _CHARACTER.sub(repeat, _GROUP.sub(repeat, text))
    if wrong := re.search(r"[^EtL|]", plain):
        raise ValueError(
            f"{said}, where {wrong[0]!r} means nothing: use E, t, L and |, "
            "with x*3 to repeat one of them and (..)*3 to repeat several"
        )
    return plain


def layout_text(chunks: Sequence[ModelChunk]) -> str:
    """The shortest text that `parse_layout` reads as these chunks, without groups."""
    parts = []
    for chunk in chunks:
        blocks = "t" * len(chunk.layers) if len(chunk.layers) <= 3 else f"t*{len(chunk.layers)}"
        parts.append("E" * chunk.has_embedding + blocks + "L" * chunk.has_loss)
    return "|".join(parts)


def crossed_units(units: Sequence[UncutBlocks], edges: Sequence[int]) -> tuple[UncutBlocks, ...]:
    """The units that reach over one of the edges; an edge is named by the block behind it."""
    return tuple(unit for unit in units if any(unit.first < edge <= unit.last for edge in edges))


def split_units(units: Sequence[UncutBlocks], chunks: Sequence[ModelChunk]) -> tuple[UncutBlocks, ...]:
    """The units of which a chunk holds a part only."""
    return crossed_units(units, _edges(chunks))


def nearest_layouts(
    units: Sequence[UncutBlocks], chunks: Sequence[ModelChunk], *, num_layers: int, limit: int
) -> tuple[tuple[ModelChunk, ...], ...]:
    """As many chunks that split no unit, with their edges moved least: at most `limit` ways, the nearest first.

    The edges are chosen one after the other: the best ways to place the first i of them, by where the i-th is, lead to
    those for the next.
    """
    allowed = [edge for edge in range(num_layers + 1) if not crossed_units(units, [edge])]
    ways: dict[int, list[tuple[int, tuple[int, ...]]]] = {0: [(0, ())]}
    for index, wanted in enumerate(_edges(chunks)):
        following = {}
        for edge in allowed:
            # Only the first chunk may be without a block here, as it has the embedding; the last one may, as it has the
            # loss.
            before = [
                way for last, found in ways.items() if last < edge or (index == 0 and last == edge) for way in found
            ]
            best = heapq.nsmallest(limit, [(cost + abs(edge - wanted), (*edges, edge)) for cost, edges in before])
            if best:
                following[edge] = best
        ways = following
    found = heapq.nsmallest(limit, [way for of_edge in ways.values() for way in of_edge])
    return tuple(_chunks(edges, num_layers) for _, edges in found)


def _edges(chunks: Sequence[ModelChunk]) -> list[int]:
    """The first block after every chunk but the last."""
    return [chunk.layers.stop for chunk in chunks[:-1]]


def _chunks(edges: Sequence[int], num_layers: int) -> tuple[ModelChunk, ...]:
    bounds = [0, *edges, num_layers]
    ranges = [range(start, stop) for start, stop in itertools.pairwise(bounds)]
    return tuple(ModelChunk(layers, index == 0, index == len(edges)) for index, layers in enumerate(ranges))
