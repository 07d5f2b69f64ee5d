"""The config of n-grams in the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.config.memory import Backbone, LookupShape
from megamem.placement.sharing import SharingPlan, common_bank
from megamem.placement.slots import ENTRY, Slot
from megamem.token_tables.config import TokenTableConfig

_BIGRAMS = NgramAddressConfig(rules="xor")


@dataclass(frozen=True)
class ResidualNgramsConfig(TokenTableConfig):
    """One table of n-grams for all layers, whose rows are added to the stream's first `value_dim` columns."""

    slot: ClassVar[Slot | None] = ENTRY
    """The residual stream, before attention and its norm."""
    follows_width: ClassVar[bool] = True
    """Rows are vectors of the stream."""
    reads_once: ClassVar[bool] = True
    """All layers weigh the same sum of rows."""
    multiplies_by_signs: ClassVar[bool] = True
    """With signs rows are read apart, and then summed."""

    kind: Literal["residual_ngrams"] = "residual_ngrams"
    """residual_ngrams: rows of n-grams, added to the residual stream before every block."""
    address: NgramAddressConfig | None = field(default_factory=lambda: _BIGRAMS)
    """Addresses by hashes of the last tokens; null: the token's id is its one address."""

    @property
    def slots_per_address(self) -> int:
        return 1

    @property
    def has_signs(self) -> bool:
        """True if rows are multiplied by signs before they are summed."""
        return self.address is not None and self.address.signs != "none"

    @property
    def lookup(self) -> LookupShape:
        if self.has_signs:
            return LookupShape.apart(self.rows_per_token)
        return LookupShape(self.rows_per_token, learns_scores=False)

    def plan(self, num_layers: int) -> SharingPlan:
        return common_bank(self.num_rows, num_layers, on_every_stage=True)

    def check(self, backbone: Backbone) -> None:
        super().check(backbone)
        if self.value_dim > backbone.hidden_size:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, but rows are added to the first columns of a residual stream of "
                f"{backbone.hidden_size}: set so many at the most"
            )
