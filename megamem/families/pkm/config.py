"""The config of a PKM layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megamem.retrieval.config import ProductKeyConfig


@dataclass(frozen=True)
class PkmConfig(ProductKeyConfig):
    """One PKM layer."""

    follows_width: ClassVar[bool] = True
    """True like a Memory+'s, whose values may also be vectors of the stream."""
    width_advice: ClassVar[str] = ", or value_projection to true"
    """Only PKM may have one."""

    kind: Literal["pkm"] = "pkm"
    """pkm: product keys."""
    value_projection: bool = False
    """Project the summed values from value_dim to hidden_size."""
    output_gate: bool = False
    """Multiply the output by a sigmoid of the input, one scalar per token (Meta's mem_gated)."""

    @property
    def has_value_projection(self) -> bool:
        return self.value_projection

    @property
    def has_output_gate(self) -> bool:
        return self.output_gate
