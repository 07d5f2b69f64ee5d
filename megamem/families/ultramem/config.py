"""The config of an UltraMem layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megamem.retrieval.config import TuckerConfig


@dataclass(frozen=True)
class UltraMemConfig(TuckerConfig):
    """One UltraMem layer (UltraMemV2, section 2): implicit value expansion, one projection per virtual block.

    Skip insertion is a matter of the placement, and sharing is open to it although the paper's tables are private.
    """

    default_expansion: ClassVar[int] = 2
    """As in the paper: four virtual blocks."""

    kind: Literal["ultramem"] = "ultramem"
    """ultramem: Tucker cores, a projection per virtual block."""

    @property
    def num_value_projections(self) -> int:
        return self.expansion**2
