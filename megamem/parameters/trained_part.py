"""Parameters to train, if only those of some blocks are, or tables alone, and the lowest block that gradients have to reach.

A parameter serves blocks: a block's own serve that block, a bank and what reads it for all layers serve the blocks whose
memories read it, and embedding, final norm and output projection serve none. It is trained if it serves a trained block.

Where tables alone are trained, those are whose readers are among the trained blocks, and nothing else is.

So a table that trained and frozen blocks share is trained, by the gradient of all its readers: it is what the trained
block's memory learns into, and a block trained around a table that stands still would be another model. Backward then
goes down to the table's lowest reader, which may be below the lowest trained block.

Blocks are counted from 0 here, as everywhere in the model; the configuration counts layers from 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megamem.config.model import ModelConfig
from megamem.placement.sharing import BankSpec

NO_BLOCK: frozenset[int] = frozenset()


class Trained(NamedTuple):
    """Part of a model that a run trains, as it is configured.

    Attributes:
        layers: numbers of layers, the first of which is 1 (`optimizer.trained_layers`); None: all of the model.
        tables_alone: tables are trained, and nothing else (`optimizer.trained_rows`).
    """

    layers: tuple[int, ...] | None = None
    tables_alone: bool = False


ALL = Trained()
"""All of a model."""


@dataclass(frozen=True)
class TrainedPart:
    """The part of a model that is trained.

    Attributes:
        model: the whole model.
        blocks: numbers of the blocks that are trained; None: all of the model.
        tables_alone: tables that these blocks read are trained, and nothing else.
    """

    model: ModelConfig
    blocks: frozenset[int] | None
    tables_alone: bool = False

    @classmethod
    def of(cls, model: ModelConfig, trained: Trained) -> TrainedPart:
        """The part that a run trains."""
        blocks = None if trained.layers is None else frozenset(number - 1 for number in trained.layers)
        return cls(model, blocks, trained.tables_alone)

    @property
    def is_whole(self) -> bool:
        """True if all of the model is trained."""
        return self.blocks is None and not self.tables_alone

    def trains(self, served: Iterable[int], *, is_table: bool = False) -> bool:
        """True if a parameter that serves these blocks is trained."""
        if self.tables_alone and not is_table:
            return False
        return self.blocks is None or not self.blocks.isdisjoint(served)

    @cached_property
    def first_block(self) -> int:
        """The lowest block whose backward pass is needed; what is below it needs no gradient. -1: the embedding's is."""
        if self.is_whole:
            return -1
        readers = [readers_of_bank(self.model, bank) for bank in self.model.memory_plan.banks]
        trained = [blocks for blocks in readers if self.trains(blocks, is_table=True)]
        own = NO_BLOCK if self.tables_alone else self.blocks or NO_BLOCK
        return min(own.union(*trained), default=self.model.num_layers)


def readers_of_bank(model: ModelConfig, bank: BankSpec) -> frozenset[int]:
    """The blocks whose memories read a bank."""
    return frozenset(model.memory_spans[layer].read for layer in bank.layers)
