"""The config of STEM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megamem.config.memory import LookupShape
from megamem.placement.sharing import SharingPlan, private_banks
from megamem.placement.slots import INSTEAD, Slot
from megamem.token_tables.config import TokenTableConfig


@dataclass(frozen=True)
class StemConfig(TokenTableConfig):
    """STEM: a table per layer, whose rows stand for the up-projection of the block's feed-forward.

    `value_dim` is the feed-forward's inner width, F.
    """

    slot: ClassVar[Slot | None] = INSTEAD
    """The place of the feed-forward."""
    follows_width: ClassVar[bool] = True
    """The inner width grows with the model, as that of feed-forwards; rows meet the gate element by element."""

    kind: Literal["stem"] = "stem"
    """stem: feed-forwards whose up-projection is the token's row, or the sum of those of its n-grams."""

    @property
    def slots_per_address(self) -> int:
        return 1

    @property
    def lookup(self) -> LookupShape:
        return LookupShape(self.rows_per_token, learns_scores=False)

    def plan(self, num_layers: int) -> SharingPlan:
        return private_banks(self.num_rows, num_layers)
