"""The config of a PEER layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megamem.config.memory import LookupShape, Table
from megamem.retrieval.config import ProductKeyConfig


@dataclass(frozen=True)
class PeerConfig(ProductKeyConfig):
    """One PEER layer: pre-values as wide as the values, gelu between them, and no projections."""

    kind: Literal["peer"] = "peer"
    """peer: product keys, experts of width 1."""

    @property
    def has_value_projection(self) -> bool:
        return False

    @property
    def tables(self) -> tuple[Table, ...]:
        return (*super().tables, Table("pre_values", self.value_dim, "value_dim", group="pre_values"))

    @property
    def lookup(self) -> LookupShape:
        return replace(super().lookup, activation="gelu")
