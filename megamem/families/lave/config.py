"""The config of LaVE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megamem.placement.sharing import SharingPlan, private_banks
from megamem.token_tables.config import MixedValuesConfig


@dataclass(frozen=True)
class LaveConfig(MixedValuesConfig):
    """LaVE: a table of value embeddings per layer."""

    kind: Literal["lave"] = "lave"
    """lave: a table of value embeddings per layer."""
    gated_standard_path: bool = False
    """Gate the attention's own value too; false: it enters as it is."""

    @property
    def slots_per_address(self) -> int:
        return 1

    def plan(self, num_layers: int) -> SharingPlan:
        return private_banks(self.num_rows, num_layers)
