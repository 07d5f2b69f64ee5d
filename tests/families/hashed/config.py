"""The config of a hashed layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from megamem.config.memory import LookupShape, MemoryConfig, Table
from megamem.placement.sharing import SharingPlan, private_banks


@dataclass(frozen=True)
class HashedConfig(MemoryConfig):
    """One hashed layer: the sum of the rows that a token's id hashes to, projected."""

    reads_tokens: ClassVar[bool] = True

    kind: Literal["hashed"] = "hashed"
    """hashed: rows by hashes of the token id."""
    num_rows: PositiveInt = 64
    """M: rows of a layer's table."""
    value_dim: PositiveInt = 16
    """V: columns of the table."""
    num_hashes: PositiveInt = 2
    """J: rows per token."""

    @property
    def tables(self) -> tuple[Table, ...]:
        return (Table("values", self.value_dim, "value_dim"),)

    @property
    def lookup(self) -> LookupShape:
        return LookupShape(self.num_hashes)

    def plan(self, num_layers: int) -> SharingPlan:
        return private_banks(self.num_rows, num_layers)
