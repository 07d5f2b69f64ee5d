"""Plan of a model's blocks: what the memories leave of each, resolved from their slots, and which they tie together.

Building, costs, growth, exports and initialisation ask the plan of a block what it has, and never which slot it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from megamem.config.model import ModelConfig
from megamem.placement.slots import BESIDE, ENTRY, Slot


@dataclass(frozen=True)
class BlockPlan:
    """One block.

    Attributes:
        slots: slots of the memories that read in it: none, one, or one in attention and one outside of it.
        memories: indices of their memory layers.
        has_layer_norm: LayerNorm stands before attention, and not RMSNorm.
        reads_once: one of its memories weighs what was read for all blocks of the chunk together.
        queried: the earlier block whose normalised stream its memory outside of attention reads with; None: its own.
        lends_query: memories of later blocks read with its normalised stream.
    """

    slots: tuple[Slot, ...] = ()
    memories: tuple[int, ...] = ()
    has_layer_norm: bool = False
    reads_once: bool = False
    queried: int | None = None
    lends_query: bool = False

    @property
    def adds_attention(self) -> bool:
        """True if its attention's output joins the residual stream; else its memory is all that it adds."""
        return not any(slot.is_inserted for slot in self.slots)

    @property
    def has_ffn(self) -> bool:
        """True if it has a feed-forward, and the norm before it."""
        return all(slot.has_ffn for slot in self.slots)

    @property
    def is_beside_ffn(self) -> bool:
        """True if a memory and the feed-forward need nothing of each other, and are added where both are done."""
        return BESIDE in self.slots

    @property
    def num_norms(self) -> int:
        """Norms of hidden states: before attention, and before what follows where attention's output is added."""
        return 2 if self.adds_attention else 1

    @property
    def has_output_projection(self) -> bool:
        """True if its attention has an output projection."""
        return all(slot.has_output_projection for slot in self.slots)

    @property
    def splits_latents(self) -> bool:
        """True if latent attention projects the latents of keys and those of values apart."""
        return any(slot.splits_latents for slot in self.slots)

    @property
    def has_memory_at_entry(self) -> bool:
        """True if a memory stands before its attention."""
        return any(slot.module == ENTRY.module for slot in self.slots)

    @property
    def has_memory_in_attention(self) -> bool:
        """True if attention calls a memory."""
        return any(slot.is_in_attention for slot in self.slots)


PLAIN = BlockPlan()
"""A block without a memory."""


@lru_cache(maxsize=64)
def plan_blocks(model: ModelConfig) -> Mapping[int, BlockPlan]:
    """The blocks in which a memory reads, by their numbers from 0; all others are `PLAIN`."""
    plans: dict[int, BlockPlan] = {}
    lending = {span.queried for span in model.memory_spans}
    for index, layer in enumerate(model.memory_layers):
        memory, span, slot = layer.memory, layer.span, layer.slot
        before = plans.get(span.read, PLAIN)
        plans[span.read] = BlockPlan(
            (*before.slots, slot),
            (*before.memories, index),
            has_layer_norm=slot.is_inserted and memory.placement.norm == "layer",
            reads_once=before.reads_once or memory.reads_once,
            queried=before.queried if span.queried is None else span.queried,
            lends_query=span.read in lending,
        )
    return MappingProxyType(plans)


def reads_beside_ffn(model: ModelConfig) -> bool:
    """Tell whether a memory of the model reads its tables while a feed-forward runs."""
    return any(plan.is_beside_ffn and not plan.reads_once for plan in plan_blocks(model).values())


def paired_in_attention(model: ModelConfig) -> frozenset[str]:
    """Names of the memory layers in attention whose blocks have another memory, too."""
    return frozenset(
        layer.name
        for plan in plan_blocks(model).values()
        for layer, slot in zip((model.memory_layers[index] for index in plan.memories), plan.slots, strict=True)
        if slot.is_in_attention and len(plan.memories) > 1
    )


def inserted_blocks(model: ModelConfig) -> tuple[int, ...]:
    """Numbers of the blocks that add nothing but their memories."""
    return tuple(block for block, plan in plan_blocks(model).items() if not plan.adds_attention)


def starts_at_zero(model: ModelConfig) -> bool:
    """True if tables begin as zeros: inserted blocks then begin as the identity (MIDUS, section 2.1)."""
    return bool(inserted_blocks(model))


def count_blocks(model: ModelConfig) -> Iterator[tuple[int, BlockPlan]]:
    """All blocks, with the number of those that have the same plan: the plain ones are counted and not listed."""
    plans = plan_blocks(model)
    yield model.num_layers - len(plans), PLAIN
    for plan in plans.values():
        yield 1, plan


def sum_over_blocks(model: ModelConfig, figure: Callable[[BlockPlan], int]) -> int:
    """Sum of a figure of every block."""
    return sum(number * figure(plan) for number, plan in count_blocks(model))


@dataclass(frozen=True)
class UncutBlocks:
    """Blocks first..last of which no chunk may hold a part only.

    They share a memory bank, a memory reads at the first of them and adds after the last, or that of the last reads with
    the stream of the first.
    """

    first: int
    last: int
    kind: Literal["group", "span", "query"]


def unsplittable_units(model: ModelConfig) -> tuple[UncutBlocks, ...]:
    """Units that no edge of a chunk may cross, because tables, pending outputs and queries do not travel between stages."""
    spans = model.memory_spans
    units = [UncutBlocks(span.read, span.add, "span") for span in spans if span.is_skip]
    units += [UncutBlocks(span.queried, span.read, "query") for span in spans if span.queried is not None]
    for bank in model.memory_plan.banks:
        first, last = spans[bank.layers[0]].read, spans[bank.layers[-1]].read
        if last > first and not bank.on_every_stage:
            units.append(UncutBlocks(first, last, "group"))
    return tuple(units)
