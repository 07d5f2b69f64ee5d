"""What a model is: the backbone and its memory, as strict immutable configs.

The docstring under a field is its help text; `EffectiveWhen` marks a field that is read only under a condition, so that the loader can
refuse a value that would change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class EffectiveWhen:
    """Marks a field that has an effect only where `condition(owner)` holds.

    Args:
        condition: takes the config object that owns the field.
        reason: the condition in words, for the error message: "<key> has no effect unless <reason>".
    """

    condition: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True)
class SharingConfig:
    """Which layers read which tables (UltraMemV2, Table 7)."""

    pattern: Literal["none", "block", "ring", "no_ring"] = "none"
    """none: a private table per layer; block: `group` consecutive layers share one; ring / no_ring: every layer sees a window of `group` tables."""
    group: Annotated[int, EffectiveWhen(lambda c: c.pattern != "none", "sharing.pattern is block, ring or no_ring")] = 1
    """Layers per block, or tables per window (the paper's g)."""
    window: Annotated[
        Literal["paper", "released"],
        EffectiveWhen(lambda c: c.pattern in ("ring", "no_ring"), "sharing.pattern is ring or no_ring"),
    ] = "paper"
    """Where layer l's window starts: paper: (group - 1) // 2 tables before l (S4 is l-1..l+2); released: at l."""

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"model.memory.sharing.group is {self.group}: it must be at least 1")


@dataclass(frozen=True)
class MemoryConfig:
    """One memory layer, the same in every block that has one (UltraMemV2, section 3)."""

    kind: Literal["ultramem_v2"] = "ultramem_v2"
    """The memory variant. Leave `model.memory` out (or null) for a dense model."""
    num_keys: int = 64
    """N: keys per side of one layer's own table, which has N^2 rows. Sharing a window of g tables raises a layer's keys to floor(N sqrt(g))."""
    key_dim: int = 32
    """Dimension of one query and one key, per side and Tucker rank."""
    value_dim: int = 64
    """V: columns of the value table."""
    pre_value_dim: int = 64
    """P: columns of the pre-value table; 0 leaves pre-values out."""
    top_k: int = 16
    """K: values retrieved per token and head."""
    row_top_k_limit: int = 128
    """The most rows and columns kept by the first selection stage, which otherwise keeps K of each (paper, section 4.1)."""
    num_heads: int = 1
    """H: retrieval heads; each has its own keys and cores, and all share the queries (as released)."""
    tucker_rank: int = 2
    """R: Tucker rank, the row (and column) scores per key."""
    num_cores: int = 2
    """C: Tucker cores; core c weights its own V/C columns of the values (2 as released, 1 as in the paper's text)."""
    query: Literal["per_rank", "single"] = "per_rank"
    """per_rank: a query per (side, Tucker rank), as in the paper; single: one query per side."""
    pre_value_activation: Annotated[
        Literal["none", "gelu"], EffectiveWhen(lambda c: c.pre_value_dim > 0, "pre_value_dim is above 0")
    ] = "none"
    """Activation of the pre-value products: none is Eq. 15, gelu is Eq. 13."""
    shuffle: Literal["keyed", "table", "none"] = "keyed"
    """How the row/column topology is broken: a stateless keyed bijection, a stored permutation (8 bytes per row and layer), or not at all."""
    initialisation: Literal["paper", "released"] = "paper"
    """paper: sigma_V of Eq. 26 with calibrated score gain; released: the constants of the public code."""
    sharing: SharingConfig = field(default_factory=SharingConfig)
    """Which layers share which tables."""

    def __post_init__(self) -> None:
        for name in (
            "num_keys",
            "key_dim",
            "value_dim",
            "top_k",
            "row_top_k_limit",
            "num_heads",
            "tucker_rank",
            "num_cores",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model.memory.{name} is {getattr(self, name)}: it must be at least 1")
        if self.pre_value_dim < 0:
            raise ValueError(
                f"model.memory.pre_value_dim is {self.pre_value_dim}: use 0 for no pre-values, or a positive width"
            )
        if self.value_dim % self.num_cores:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, which num_cores = {self.num_cores} does not divide: each core weights its own slice of the values"
            )
        if self.row_top_k > self.num_keys:
            raise ValueError(
                f"model.memory.num_keys is {self.num_keys}, but {self.row_top_k} rows are to be selected (the smaller of top_k and row_top_k_limit): raise num_keys or lower top_k"
            )
        if self.row_top_k**2 < self.top_k:
            raise ValueError(
                f"model.memory.top_k is {self.top_k}, but row_top_k_limit = {self.row_top_k_limit} leaves a grid of {self.row_top_k**2} candidates: "
                f"raise row_top_k_limit to at least {math.isqrt(self.top_k - 1) + 1}"
            )

    @property
    def row_top_k(self) -> int:
        """Rows (and columns) that the first selection stage keeps."""
        return min(self.top_k, self.row_top_k_limit)

    @property
    def num_queries(self) -> int:
        """Query vectors per token and head."""
        return 2 * self.tucker_rank if self.query == "per_rank" else 2


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer (RMSNorm, SwiGLU, RoPE), with or without memory layers."""

    num_layers: int = 4
    """L: transformer blocks."""
    hidden_size: int = 128
    """D: width of the residual stream."""
    num_attention_heads: int = 4
    """Query heads."""
    num_query_groups: int | None = None
    """Key/value heads (grouped-query attention); null: one per query head."""
    head_dim: int | None = None
    """Width of one attention head; null: hidden_size / num_attention_heads."""
    ffn_hidden_size: int = 256
    """Inner width of the SwiGLU feed-forward (the true width, not the fused up + gate one)."""
    vocab_size: int | None = None
    """Token ids of the embedding before padding; null: what the tokenizer of the data set has."""
    vocab_size_multiple: int = 128
    """The embedding's rows are padded to a multiple of this, whatever the layout."""
    tied_embeddings: bool = True
    """Use the input embedding as the output projection."""
    qk_norm: bool = True
    """RMS-normalise queries and keys per head before RoPE."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in every RMSNorm of the backbone and the memory."""
    rotary_base: int = 10000
    """RoPE base theta."""
    init_std: float | None = None
    """Standard deviation of the initial linear weights and embeddings; null: sqrt(2 / (5 hidden_size))."""
    implementation: Literal["local", "transformer_engine"] = "local"
    """Attention, norms and linears: Megatron's local layers with PyTorch SDPA, or Transformer Engine's."""
    memory: MemoryConfig | None = None
    """The memory beside the feed-forward of every block; null: a dense model."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "head_dim",
            "ffn_hidden_size",
            "vocab_size_multiple",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}: it must be at least 1")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"model.hidden_size is {self.hidden_size}, which num_attention_heads = {self.num_attention_heads} does not divide: change one, or set model.head_dim"
            )
        if self.attention_head_dim % 2:
            raise ValueError(f"the width of an attention head is {self.attention_head_dim}: RoPE needs an even one")
        if self.num_attention_heads % self.query_groups:
            raise ValueError(
                f"model.num_query_groups is {self.num_query_groups}, which does not divide num_attention_heads = {self.num_attention_heads}"
            )
        if self.memory is not None and self.memory.sharing.pattern != "none":
            group = self.memory.sharing.group
            if group > self.num_layers:
                raise ValueError(f"model.memory.sharing.group is {group}, more than num_layers = {self.num_layers}")
            if self.memory.sharing.pattern == "block" and self.num_layers % group:
                raise ValueError(
                    f"model.memory.sharing.group is {group}, which does not divide num_layers = {self.num_layers}"
                )

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        return self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads

    @property
    def linear_std(self) -> float:
        """Standard deviation of initial linear weights, sqrt(2 / 5D) unless set."""
        return self.init_std if self.init_std is not None else math.sqrt(2 / (5 * self.hidden_size))
