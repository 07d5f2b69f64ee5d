"""Where layers and ranks go: the arithmetic of a layout, without any process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megamem.config import ModelConfig
from megamem.sharing import plan_sharing


def chunk_layers(num_layers: int, *, pipeline: int, virtual_pipeline: int, pipeline_rank: int, chunk: int) -> range:
    """Global 0-based layers of one model chunk, as Megatron places them.

    Stage p of P holds chunks p, P + p, 2P + p, ... of the P x VP equal parts of the depth.

    Args:
        num_layers: layers of the model, divisible by pipeline x virtual_pipeline.
        pipeline: stages.
        virtual_pipeline: chunks per stage.
        pipeline_rank: the stage.
        chunk: which of its chunks.
    """
    per_chunk = num_layers // (pipeline * virtual_pipeline)
    first = (chunk * pipeline + pipeline_rank) * per_chunk
    return range(first, first + per_chunk)


@dataclass(frozen=True)
class Unit:
    """Blocks first..last of which no chunk may hold a part only.

    They share a memory bank, or a memory reads at the first of them and adds after the last.
    """

    first: int
    last: int
    kind: Literal["group", "span"]


def unsplittable_units(model: ModelConfig) -> tuple[Unit, ...]:
    """What must not reach over the edge of a chunk, because tables and pending outputs do not travel between stages."""
    spans = model.memory_spans
    units = [Unit(span.read, span.add, "span") for span in spans if span.is_skip]
    if model.memory is not None:
        for bank in plan_sharing(model.memory, len(spans)).banks:
            first, last = spans[bank.layers[0]].read, spans[bank.layers[-1]].read
            if last > first:
                units.append(Unit(first, last, "group"))
    return tuple(units)


def split_units(units: Sequence[Unit], *, num_layers: int, chunks: int) -> tuple[Unit, ...]:
    """The units that a depth cut into `chunks` equal parts would split."""
    per_chunk = num_layers // chunks
    return tuple(unit for unit in units if unit.first // per_chunk != unit.last // per_chunk)


def padded_size(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple
