"""The config and the slot of a memory behind attention's heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from megamem.config.memory import LookupShape, MemoryConfig, Table
from megamem.placement.sharing import SharingPlan, private_banks
from megamem.placement.slots import Slot

HEADS = Slot("heads", f"{__package__}.block:edit", module="self_attention.core_attention", needs_plain_attention=True)
"""h + Attn with Mem(heads) added to the heads before the output projection: `forward(heads, inputs)` takes and returns
[s, b, n, d], for the heads of this tensor-parallel rank and all tokens of its context-parallel rank."""


@dataclass(frozen=True)
class BehindHeadsConfig(MemoryConfig):
    """One layer: every head is multiplied with the row of its token."""

    slot: ClassVar[Slot | None] = HEADS
    reads_tokens: ClassVar[bool] = True

    kind: Literal["behind_heads"] = "behind_heads"
    """behind_heads: rows of tokens, for attention's heads."""
    num_rows: PositiveInt = 64
    """M: rows of a layer's table."""
    value_dim: PositiveInt = 16
    """V: columns of the table, which are those of a head."""

    @property
    def tables(self) -> tuple[Table, ...]:
        return (Table("values", self.value_dim, "value_dim"),)

    @property
    def lookup(self) -> LookupShape:
        return LookupShape(1)

    def plan(self, num_layers: int) -> SharingPlan:
        return private_banks(self.num_rows, num_layers)
