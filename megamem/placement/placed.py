"""The memory layers of a model, of one family or of two, in the order of the blocks that they read in.

Each family counts its own layers and banks. In a model of two, banks of the second come behind those of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megamem.config.memory import MemoryConfig
from megamem.placement.sharing import BankSpec, LayerView, SharingPlan
from megamem.placement.slots import Slot
from megamem.placement.spans import Span, count_memory_layers, resolve_placement


@dataclass(frozen=True)
class PlacedMemory:
    """One memory layer: the record that building, costs, growth, exports and initialisation read.

    Attributes:
        memory: config of its family.
        number: place among the layers of its family.
        span: the block that it reads in, and the one after which it adds.
        view: view of its bank, by the model's number.
    """

    memory: MemoryConfig
    number: int
    span: Span
    view: LayerView

    @property
    def slot(self) -> Slot:
        """Place in the block at which it acts."""
        return self.memory.slot_of(self.span)

    @property
    def name(self) -> str:
        """Global name of the layer."""
        return f"decoder.layers.{self.span.read}.{self.slot.module}.memory"


@dataclass(frozen=True)
class Placed:
    """All memory layers of a model.

    Attributes:
        layers: layers in the order of their blocks.
        banks: banks of all families, whose layers are numbers in `layers`.
        families: config of each bank's family.
    """

    layers: tuple[PlacedMemory, ...]
    banks: tuple[BankSpec, ...]
    families: tuple[MemoryConfig, ...]

    @property
    def plan(self) -> SharingPlan:
        """Banks, and what each layer sees of which."""
        return SharingPlan(self.banks, tuple(layer.view for layer in self.layers))


def place(memories: Sequence[MemoryConfig], num_layers: int) -> Placed:
    """The memory layers of a model of `num_layers` blocks."""
    plans = [memory.plan(count_memory_layers(memory.placement, num_layers)) for memory in memories]
    layers: list[PlacedMemory] = []
    before = 0
    for memory, plan in zip(memories, plans, strict=True):
        spans = resolve_placement(memory.placement, num_layers)
        for number, (span, view) in enumerate(zip(spans, plan.views, strict=True)):
            moved = replace(view, bank=before + view.bank, banks_before=before) if before else view
            layers.append(PlacedMemory(memory, number, span, moved))
        before += len(plan.banks)
    layers.sort(key=lambda layer: layer.span.read)
    banks: list[BankSpec] = []
    for memory, plan in zip(memories, plans, strict=True):
        of_family = [index for index, layer in enumerate(layers) if layer.memory is memory]
        banks += [
            replace(bank, index=len(banks) + bank.index, layers=tuple(of_family[number] for number in bank.layers))
            for bank in plan.banks
        ]
    families = tuple(memory for memory, plan in zip(memories, plans, strict=True) for _ in plan.banks)
    return Placed(tuple(layers), tuple(banks), families)
