"""The config of a Memory+ layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megamem.retrieval.config import ProductKeyConfig


@dataclass(frozen=True)
class MemoryPlusConfig(ProductKeyConfig):
    """One Memory+ layer."""

    follows_width: ClassVar[bool] = True
    """Keys and values keep their widths; queries and gates are made of the stream."""

    kind: Literal["memory_plus"] = "memory_plus"
    """memory_plus: product keys, silu-gated values."""
    output_gate: bool = False
    """Multiply the output by a sigmoid of the input, one scalar per token (Meta's mem_gated)."""

    @property
    def has_output_gate(self) -> bool:
        return self.output_gate
