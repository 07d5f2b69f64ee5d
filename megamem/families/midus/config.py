"""The config of MIDUS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from megamem.config.memory import Backbone, LookupShape, MemoryConfig, ObservedQuantities, Scoring, Table
from megamem.placement.sharing import SharingPlan, private_banks
from megamem.placement.slots import Slot
from megamem.placement.spans import Span

_BLOCK = "megamem.families.midus.block"

BEHIND_HEADS = Slot(
    "block",
    f"{_BLOCK}:edit_heads",
    module="self_attention.core_attention",
    has_ffn=False,
    has_output_projection=False,
    is_inserted=True,
    needs_plain_attention=True,
    is_exported=True,
)
"""x + Mem(heads): the memory takes the place of the output projection and of the feed-forward. `forward(heads, inputs)`
returns [s, b, n, d] for the outputs of this tensor-parallel rank's heads, of all s tokens of its context-parallel rank;
the heads of all ranks together are as wide as x."""
STREAM_AND_HEADS = Slot(
    "stream_and_heads",
    f"{_BLOCK}:edit_stream_and_heads",
    has_ffn=False,
    has_output_projection=False,
    is_inserted=True,
    needs_plain_attention=True,
    is_exported=True,
)
"""x + Mem(x + heads): as `megamem.placement.slots.INSERTED`, without an output projection."""
PROJECTED = Slot(
    "projected",
    f"{_BLOCK}:edit_projected",
    has_ffn=False,
    is_inserted=True,
    needs_plain_attention=True,
    is_exported=True,
)
"""x + Mem(Attn(Norm(x))): as `INSERTED` of `slots.py`, without the residual stream in what the memory is given."""


@dataclass(frozen=True)
class MidusConfig(MemoryConfig):
    """One block of head-wise memory: attention without an output projection, every head of which reads by keys of its
    own from a table that the heads share."""

    scoring: ClassVar[Scoring | None] = Scoring.HEADS
    """By sums of a row's and a column's score, for attention's heads."""
    slot: ClassVar[Slot | None] = BEHIND_HEADS
    """All that its block adds; behind its heads, unless `query_from` says otherwise."""
    expands_values: ClassVar[bool] = True
    """By the matrix of each head."""

    kind: Literal["midus"] = "midus"
    """midus: inserted blocks of head-wise memory."""
    num_heads: PositiveInt = 4
    """H: heads, which are those of attention: model.num_attention_heads."""
    num_keys: PositiveInt = 64
    """N: keys per side of a head; a block's table has N^2 rows."""
    top_k: PositiveInt = 4
    """K: values retrieved per token and head."""
    value_dim: PositiveInt = 32
    """V: columns of the table that a block's heads share (the paper's r), from which each head expands its own values;
    the width of a head is the paper's."""

    query_from: Literal["heads", "stream_and_heads", "projected"] = "heads"
    """Source of the heads' queries, which are cut from it (Table 11): heads: the outputs of attention's heads;
    stream_and_heads: the residual stream with them; projected: what the output projection makes of them."""
    query_norm: Literal["none", "layer"] = "none"
    """Norm of every head's queries (Table 11): none: they meet the keys as they are; layer: LayerNorm, with a gain and
    a bias of each head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.num_keys:
            raise ValueError(
                f"model.memory.num_keys is {self.num_keys}, but {self.top_k} rows are to be selected (top_k): raise "
                "num_keys or lower top_k"
            )

    def check(self, backbone: Backbone) -> None:
        hidden_size, head_dim = backbone.hidden_size, backbone.head_dim
        if backbone.num_heads * head_dim != hidden_size:
            raise ValueError(
                f"model.memory.kind is {self.kind}, whose blocks add what their heads read to the residual stream, but "
                f"{backbone.num_heads} heads of {head_dim} columns are not hidden_size = {hidden_size} wide: leave "
                "model.head_dim at null"
            )
        if self.num_heads * head_dim != hidden_size:
            raise ValueError(
                f"model.memory.num_heads is {self.num_heads}, but hidden_size = {hidden_size} is made of "
                f"{hidden_size / head_dim:g} heads of {head_dim} columns: every head of attention has a memory, set "
                "model.memory.num_heads to model.num_attention_heads"
            )

    @property
    def reads_whole_tokens(self) -> bool:
        """True if queries are cut from columns of all heads together, so that every tensor-parallel rank reads with all
        heads for its own tokens."""
        return self.query_from != "heads"

    def slot_of(self, span: Span) -> Slot:
        return {"heads": BEHIND_HEADS, "stream_and_heads": STREAM_AND_HEADS, "projected": PROJECTED}[self.query_from]

    @property
    def tables(self) -> tuple[Table, ...]:
        return (Table("values", self.value_dim, "value_dim"),)

    @property
    def lookup(self) -> LookupShape:
        return LookupShape(self.num_heads * self.top_k, bins=self.num_heads)

    @property
    def tensor_sizes(self) -> Mapping[str, int]:
        return {} if self.reads_whole_tokens else {"num_heads": self.num_heads}

    @property
    def observed(self) -> ObservedQuantities:
        return ObservedQuantities(scores=True)

    def plan(self, num_layers: int) -> SharingPlan:
        return private_banks(self.num_keys**2, num_layers)
