"""The config of an UltraMemV2 layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import NonNegativeInt

from megamem.config.base import Advice, EffectiveWhen
from megamem.retrieval.config import TuckerConfig


@dataclass(frozen=True)
class UltraMemV2Config(TuckerConfig):
    """One UltraMemV2 layer (UltraMemV2, section 3)."""

    kind: Literal["ultramem_v2"] = "ultramem_v2"
    """ultramem_v2: Tucker cores, pre-values."""
    pre_value_dim: Annotated[NonNegativeInt, Advice("0 leaves pre-values out")] = 64
    """P: columns of the pre-value table; 0 leaves pre-values out. (PEER's are as wide as its values, other families
    have none.)"""
    query: Literal["per_rank", "single"] = "per_rank"
    """per_rank: a query per (side, Tucker rank), as in the paper; single: one query per side (as always in
    UltraMem)."""
    value_blocks: Annotated[
        Literal["summed", "projected"], EffectiveWhen(lambda c: c.expansion > 1, "key_expansion is above 1")
    ] = "summed"
    """summed: one value projection for all virtual blocks (Eq. 12); projected: one for each (Eq. 9, as always in
    UltraMem)."""
    pre_value_activation: Annotated[
        Literal["none", "gelu"], EffectiveWhen(lambda c: c.pre_value_dim > 0, "pre_value_dim is above 0")
    ] = "none"
    """Activation of the pre-value products: none is Eq. 15, gelu is Eq. 13 (as always in PEER)."""
