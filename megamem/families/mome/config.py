"""The config of MoME."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from megamem.config.memory import Backbone, LookupShape
from megamem.placement.sharing import SharingPlan, common_bank, private_banks
from megamem.token_tables.config import HeadValuesConfig


@dataclass(frozen=True)
class MomeConfig(HeadValuesConfig):
    """MoME: rows of a token as wide as a head, of which every key/value head adds the K that its router chooses."""

    follows_width: ClassVar[bool] = True
    """Routers are made of the stream, or of heads; rows are as wide as these."""
    chooses_among_rows: ClassVar[bool] = True
    """By the routers."""

    kind: Literal["mome"] = "mome"
    """mome: rows of the token that heads of attention's values choose from."""
    value_dim: PositiveInt = 32
    """V: columns of a row, which are those of a head."""
    num_heads: PositiveInt = 4
    """G: key/value heads of attention, each of which chooses by itself."""
    num_slots: PositiveInt = 8
    """M: rows of a token id, or of an address."""
    active_slots: PositiveInt = 2
    """K: rows that a head chooses. One is weighted by a softmax over all, several by sigmoids over their sum."""
    router_input: Literal["hidden", "value"] = "hidden"
    """Vectors that slots are chosen by. hidden: attention's input, with weights for each head; value: the head's own value, with
    weights that all heads share."""
    gate_channels: PositiveInt = 32
    """First columns of attention's input, of which the gates of heads are made."""
    one_table: bool = False
    """Let all layers read one table; false: each has its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active_slots > self.rows_per_token:
            raise ValueError(
                f"model.memory.active_slots is {self.active_slots}, but a token has {self.rows_per_token} rows: raise "
                "model.memory.num_slots, or choose so many at the most"
            )

    @property
    def slots_per_address(self) -> int:
        return self.num_slots

    @property
    def known_rows(self) -> int:
        return self.rows_per_token

    @property
    def follows_head_width(self) -> bool:
        # The shared router's inputs would be wider, and no rule says so of them.
        return self.router_input == "hidden"

    @property
    def lookup(self) -> LookupShape:
        return LookupShape(self.num_heads * self.active_slots, bins=self.num_heads)

    @property
    def slot_names(self) -> tuple[str, ...]:
        return tuple(str(slot) for slot in range(1, self.rows_per_token + 1))

    def plan(self, num_layers: int) -> SharingPlan:
        if self.one_table:
            return common_bank(self.num_rows, num_layers, on_every_stage=True)
        return private_banks(self.num_rows, num_layers)

    @property
    def handed_to_tokens(self) -> int:
        return self.rows_per_token if self.router_input == "value" else 0

    def check(self, backbone: Backbone) -> None:
        super().check(backbone)
        if self.num_heads != backbone.query_groups:
            raise ValueError(
                f"model.memory.num_heads is {self.num_heads}, but attention has {backbone.query_groups} key/value heads, each of "
                f"which chooses rows: set model.memory.num_heads: {backbone.query_groups}"
            )
        if self.value_dim != backbone.head_dim:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, but rows are added to heads of {backbone.head_dim} columns as "
                f"they are: set model.memory.value_dim: {backbone.head_dim}"
            )
