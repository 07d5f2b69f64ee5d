"""The config of a linear memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from megamem.config.memory import Backbone, LookupShape, MemoryConfig, ObservedQuantities, Scoring, Table
from megamem.placement.sharing import SharingPlan, private_banks


@dataclass(frozen=True)
class LinearConfig(MemoryConfig):
    """One linear memory: every row of the table has a key, which each head compares with its query (MIDUS, Eq. 8-9)."""

    follows_width: ClassVar[bool] = True
    """Keys keep their width, values are vectors of the stream."""
    scoring: ClassVar[Scoring | None] = Scoring.ROWS
    """By a key for every row."""

    kind: Literal["linear_memory"] = "linear_memory"
    """linear_memory: a key per row."""
    num_heads: PositiveInt = 1
    """H: heads, each with queries and keys of its own; they share the values."""
    num_rows: PositiveInt = 1024
    """N: rows of a layer's table, and keys of each head: a token is scored against all of them."""
    key_dim: PositiveInt = 32
    """Dimension of one query and one key."""
    top_k: PositiveInt = 16
    """K: values retrieved per token and head."""
    value_dim: PositiveInt = 64
    """V: columns of the value table: hidden_size, as no projection follows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.num_rows:
            raise ValueError(
                f"model.memory.num_rows is {self.num_rows}, but {self.top_k} rows are to be selected (top_k): raise "
                "num_rows or lower top_k"
            )

    def check(self, backbone: Backbone) -> None:
        if self.value_dim != backbone.hidden_size:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, but kind {self.kind} has no value projection: set it to "
                f"hidden_size = {backbone.hidden_size}"
            )

    @property
    def tables(self) -> tuple[Table, ...]:
        return (Table("values", self.value_dim, "value_dim"),)

    @property
    def lookup(self) -> LookupShape:
        return LookupShape(self.num_heads * self.top_k)

    @property
    def observed(self) -> ObservedQuantities:
        return ObservedQuantities(scores=True)

    def plan(self, num_layers: int) -> SharingPlan:
        return private_banks(self.num_rows, num_layers)
