"""The config of an UltraMem layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from megamem.config.base import EffectiveWhen
from megamem.retrieval.config import TuckerConfig


@dataclass(frozen=True)
class UltraMemConfig(TuckerConfig):
    """One UltraMem layer (UltraMemV2, section 2): implicit value expansion, one projection per virtual block.

    Skip insertion is a matter of the placement, and sharing is open to it although the paper's tables are private.
    """

    default_expansion: ClassVar[int] = 2
    """Four virtual blocks, the paper's number."""

    kind: Literal["ultramem"] = "ultramem"
    """ultramem: Tucker cores, a projection per virtual block."""
    queries_per_head: Annotated[bool, EffectiveWhen(lambda c: c.num_heads > 1, "num_heads is above 1")] = False
    """Every head has queries of its own, as with product keys (MIDUS, Table 3); false: all have the same, as
    released."""

    @property
    def query(self) -> Literal["per_rank", "per_head", "single"]:
        return "per_head" if self.queries_per_head else "single"

    @property
    def value_blocks(self) -> Literal["summed", "projected"]:
        return "projected"
