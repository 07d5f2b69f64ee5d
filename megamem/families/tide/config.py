"""The config of TIDE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from megamem.config.memory import Backbone, LookupShape, ObservedQuantities
from megamem.placement.sharing import SharingPlan, common_bank
from megamem.token_tables.config import TokenTableConfig


@dataclass(frozen=True)
class TideConfig(TokenTableConfig):
    """TIDE: K tables of token embeddings, of which every layer adds a mixture beside its feed-forward."""

    follows_width: ClassVar[bool] = True
    """Rows are vectors of the stream, the router is made of it."""
    reads_once: ClassVar[bool] = True
    """All layers weigh the same rows."""

    kind: Literal["tide"] = "tide"
    """tide: tables indexed by the token, beside the feed-forward of every layer."""
    num_tables: PositiveInt = 8
    """Tables, each with a row per token id, or per address; the router has one place more, for adding nothing."""
    row_gain: bool = True
    """Multiply normalised rows by a learned gain, one vector per table; false: rows have mean square 1."""

    @property
    def slots_per_address(self) -> int:
        return self.num_tables

    @property
    def lookup(self) -> LookupShape:
        return LookupShape.apart(self.rows_per_token)

    @property
    def observed(self) -> ObservedQuantities:
        return ObservedQuantities(router=True)

    @property
    def slot_names(self) -> tuple[str, ...]:
        return (*(str(table) for table in range(1, self.rows_per_token + 1)), "null")

    def plan(self, num_layers: int) -> SharingPlan:
        return common_bank(self.num_rows, num_layers, on_every_stage=True)

    def check(self, backbone: Backbone) -> None:
        super().check(backbone)
        if self.value_dim != backbone.hidden_size:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, but rows are added to a residual stream of "
                f"{backbone.hidden_size} columns as they are: set model.memory.value_dim: {backbone.hidden_size}"
            )
