"""The config of MoVE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveInt

from megamem.placement.sharing import SharingPlan, common_bank
from megamem.token_tables.config import MixedValuesConfig


@dataclass(frozen=True)
class MoveConfig(MixedValuesConfig):
    """MoVE: one bank of value embeddings that every layer mixes by gates of its own."""

    kind: Literal["move"] = "move"
    """move: value embeddings shared by all layers."""
    num_slots: PositiveInt = 2
    """M: value embeddings of a token id (half the layers is the paper's x1)."""

    @property
    def slots_per_address(self) -> int:
        return self.num_slots

    def plan(self, num_layers: int) -> SharingPlan:
        return common_bank(self.num_rows, num_layers, on_every_stage=True)
