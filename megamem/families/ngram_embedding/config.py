"""The config of n-grams in the input embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.placement.slots import EMBEDDING, Slot
from megamem.placement.spans import PlacementConfig
from megamem.token_tables.config import NarrowRowsConfig

_FIRST_BLOCK = PlacementConfig(blocks=(0,))


@dataclass(frozen=True)
class NgramEmbeddingConfig(NarrowRowsConfig):
    """Rows of n-grams join the input embedding; `value_dim` is hidden_size over the number of addresses in the paper."""

    slot: ClassVar[Slot | None] = EMBEDDING
    """The input embedding."""
    follows_width: ClassVar[bool] = True
    """Rows have a width of their own, and the projection is one from rows."""

    kind: Literal["ngram_embedding"] = "ngram_embedding"
    """ngram_embedding: projected rows of n-grams, averaged with the token's input embedding."""
    address: NgramAddressConfig | None = field(default_factory=NgramAddressConfig)
    """Addresses by hashes of the last tokens (LongCat's have rules: polynomial); null: the token's id is its one address."""
    amplification: Literal["none", "sqrt_width", "layer_norm"] = "none"
    """Factor of the embedding that the blocks get. none: 1; sqrt_width: the root of hidden_size; layer_norm: that of a LayerNorm
    without gain and bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.placement == PlacementConfig():
            object.__setattr__(self, "placement", _FIRST_BLOCK)
        if self.placement != _FIRST_BLOCK:
            raise ValueError(
                f"model.memory.placement names blocks, but kind {self.kind} joins the input embedding, before block 0: leave "
                "model.memory.placement out"
            )

    @property
    def exported(self) -> Mapping[str, str]:
        return {"amplification": self.amplification}
