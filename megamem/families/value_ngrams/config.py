"""The config of n-grams in attention's values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import PositiveInt

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.config.memory import Backbone
from megamem.token_tables.config import HeadValuesConfig, NarrowRowsConfig


@dataclass(frozen=True)
class ValueNgramsConfig(NarrowRowsConfig, HeadValuesConfig):
    """Narrow rows of n-grams, a table per layer, whose addresses all layers share."""

    follows_width: ClassVar[bool] = True
    """Rows and the gate's channels have widths of their own, and the projection is one from rows."""

    kind: Literal["value_ngrams"] = "value_ngrams"
    """value_ngrams: narrow rows of n-grams, gated and added to attention's values."""
    address: NgramAddressConfig | None = field(default_factory=NgramAddressConfig)
    """Addresses by hashes of the last tokens; null: the token's id is its one address."""
    value_dim: PositiveInt = 32
    """V: columns of a row. A token's memory is the rows of its addresses, side by side."""
    into: Literal["all_heads", "one_head"] = "all_heads"
    """Values that get the memory. all_heads: those of all heads, through a projection; one_head: those of one key/value head, as
    it is: of head l modulo their number in memory layer l."""
    gate_bias: bool = False
    """Add a bias to the gate's logit."""

    @property
    def slot_names(self) -> tuple[str, ...]:
        return ("gate",)

    def check(self, backbone: Backbone) -> None:
        super().check(backbone)
        if self.into == "one_head" and self.memory_width != backbone.head_dim:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, so that a token's {self.rows_per_token} rows have "
                f"{self.memory_width} columns, but into: one_head adds them to a head's {backbone.head_dim} as they are: "
                "change model.memory.value_dim or the addresses, or use into: all_heads"
            )
