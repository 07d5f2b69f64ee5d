"""What a model is: the backbone and its memory, as strict immutable configs.

The docstring under a field is its help text; `EffectiveWhen` marks a field that is read only under a condition, so that the loader can
refuse a value that would change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megamem.identity import Role
from megamem.spans import Span, count_memory_layers, parse_spans, resolve_placement


@dataclass(frozen=True)
class EffectiveWhen:
    """Marks a field that has an effect only where `condition(owner)` holds.

    Args:
        condition: takes the config object that owns the field.
        reason: the condition in words, for the error message: "<key> has no effect unless <reason>".
    """

    condition: Callable[[Any], bool]
    reason: str


MemoryKind = Literal["ultramem_v2", "ultramem", "pkm", "memory_plus", "peer"]
Initialisation = Literal["paper", "matched", "released"]


def _only_for(*kinds: MemoryKind) -> EffectiveWhen:
    """Marks a field of `MemoryConfig` that some kinds of memory do not have."""
    words = ", ".join(kinds[:-1]) + " or " + kinds[-1] if len(kinds) > 1 else kinds[0]
    return EffectiveWhen(lambda c: c.kind in kinds, f"kind is {words}")


@dataclass(frozen=True)
class SharingConfig:
    """Which layers read which tables (UltraMemV2, Table 7)."""

    pattern: Literal["none", "block", "ring", "no_ring", "all"] = "none"
    """none: a private table per layer; block: `group` consecutive layers share one; ring, no_ring: every layer sees a window of `group` tables; all: one table of N^2 rows for all layers (Memory+)."""
    group: Annotated[
        int, EffectiveWhen(lambda c: c.pattern not in ("none", "all"), "sharing.pattern is block, ring or no_ring")
    ] = 1
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
class PlacementConfig:
    """Which blocks (counted from 0) have a memory, and where its output goes."""

    every: Annotated[
        int,
        EffectiveWhen(lambda c: c.blocks is None and c.spans is None, "placement.blocks and placement.spans are null"),
    ] = 1
    """Every n-th block has a memory, the last of each n: blocks n - 1, 2n - 1, ... (1: every block)."""
    blocks: Annotated[tuple[int, ...] | None, EffectiveWhen(lambda c: c.spans is None, "placement.spans is null")] = (
        None
    )
    """The blocks with a memory, ascending; null: every n-th."""
    spans: str | None = None
    """UltraMem's skip insertion, read:add pairs joined by / as in 2:5/6:9: read the feed-forward's input in the first block, add after the second. Null: the memory adds where it reads."""
    position: Annotated[
        Literal["beside", "instead"], EffectiveWhen(lambda c: c.spans is None, "placement.spans is null")
    ] = "beside"
    """beside: the memory adds to the feed-forward of its block; instead: it replaces it."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"model.memory.placement.every is {self.every}: it must be at least 1")
        if self.spans is not None:
            parse_spans(self.spans)
        blocks = self.blocks
        if blocks is not None and (not blocks or list(blocks) != sorted(set(blocks)) or blocks[0] < 0):
            raise ValueError(
                f"model.memory.placement.blocks is {list(blocks)}: list 0-based blocks in ascending order, each once and at least one "
                "(leave model.memory out for a model without)"
            )


@dataclass(frozen=True)
class MemoryConfig:
    """One memory layer, the same in every block that has one (UltraMemV2, section 3).

    What a kind fixes or derives instead of reading a field stands in the properties: the layers read those.
    """

    kind: MemoryKind = "ultramem_v2"
    """ultramem_v2, ultramem, or with product keys: pkm, memory_plus (silu-gated values), peer (experts of width 1). Leave `model.memory` out (or null) for a dense model."""
    num_keys: int = 64
    """N: keys per side of one layer's own table, which has N^2 rows. Sharing a window of g tables raises a layer's keys to floor(N sqrt(g))."""
    key_dim: int = 32
    """Dimension of one query and one key, per side (and Tucker rank)."""
    value_dim: int = 64
    """V: columns of the value table; hidden_size where no value projection follows (peer, and pkm without value_projection)."""
    pre_value_dim: Annotated[int, _only_for("ultramem_v2")] = 64
    """P: columns of the pre-value table; 0 leaves pre-values out. (PEER's are as wide as its values, the other kinds have none.)"""
    top_k: int = 16
    """K: values retrieved per token and head."""
    row_top_k_limit: int = 128
    """The most rows and columns kept by the first selection stage, which otherwise keeps K of each (paper, section 4.1)."""
    num_heads: int = 1
    """H: retrieval heads, each with its own keys and cores. They share their queries (as released); with product keys each has its own."""
    tucker_rank: Annotated[int, _only_for("ultramem_v2", "ultramem")] = 2
    """R: Tucker rank, the row (and column) scores per key."""
    num_cores: Annotated[int, _only_for("ultramem_v2", "ultramem")] = 2
    """C: Tucker cores; core c weights its own V/C columns of the values (2 as released, 1 as in the paper's text)."""
    query: Annotated[Literal["per_rank", "single"], _only_for("ultramem_v2")] = "per_rank"
    """per_rank: a query per (side, Tucker rank), as in the paper; single: one query per side (as always in UltraMem)."""
    key_expansion: Annotated[int | None, _only_for("ultramem_v2", "ultramem")] = None
    """e: e times the keys per side address e^2 virtual blocks that read the same rows (Eq. 8); null: 1 for ultramem_v2, 2 for ultramem."""
    value_blocks: Annotated[
        Literal["summed", "projected"],
        EffectiveWhen(
            lambda c: c.kind == "ultramem_v2" and c.expansion > 1, "kind is ultramem_v2 and key_expansion is above 1"
        ),
    ] = "summed"
    """summed: one value projection for all virtual blocks (Eq. 12); projected: one for each (Eq. 9, as always in UltraMem)."""
    pre_value_activation: Annotated[
        Literal["none", "gelu"],
        EffectiveWhen(
            lambda c: c.kind == "ultramem_v2" and c.pre_value_dim > 0,
            "kind is ultramem_v2 and pre_value_dim is above 0",
        ),
    ] = "none"
    """Activation of the pre-value products: none is Eq. 15, gelu is Eq. 13 (as always in PEER)."""
    shuffle: Annotated[Literal["keyed", "table", "none"], _only_for("ultramem_v2", "ultramem")] = "keyed"
    """How the row/column topology is broken: a stateless keyed bijection, a stored permutation (8 bytes per slot and layer), or not at all."""
    query_norm: Annotated[bool, _only_for("pkm", "memory_plus", "peer")] = True
    """RMS-normalise the queries of product keys, as UltraMemV2's public code does; Meta's release does not."""
    biases: Annotated[bool, _only_for("pkm", "memory_plus", "peer")] = False
    """Biases in every projection of the layer, as in Meta's release."""
    value_projection: Annotated[bool, _only_for("pkm")] = False
    """Project the summed values from value_dim to hidden_size (the other kinds but peer always do)."""
    output_gate: Annotated[bool, _only_for("pkm", "memory_plus")] = False
    """Multiply the output by a sigmoid of the input, one scalar per token (Meta's mem_gated)."""
    initialisation: Annotated[Initialisation, _only_for("ultramem_v2", "ultramem")] = "paper"
    """paper: sigma_V of Eq. 26 with calibrated score gain; matched: the same with the SwiGLU's true variance, a third of Eq. 25's; released: the public constants (as always with product keys)."""
    tucker_penalty_weight: Annotated[
        float,
        EffectiveWhen(
            lambda c: c.has_tucker_cores and c.tucker_rank > 1,
            "kind is ultramem_v2 or ultramem and tucker_rank is above 1",
        ),
    ] = 0.0
    """Weight (alpha) of the penalty on the cores' non-leading singular values, Eq. 17, per layer; 0: off, as in the paper."""
    tucker_penalty_margin: Annotated[
        float, EffectiveWhen(lambda c: c.tucker_penalty_weight > 0, "tucker_penalty_weight is above 0")
    ] = 0.15
    """tau of Eq. 17: singular values up to this cost nothing."""
    key_balance_weight: float = 0.0
    """Weight (beta) of the key-balance loss, Eq. 19, per layer, with selection frequencies that sum to 1 as released; 0: off, as in the paper."""
    sharing: SharingConfig = field(default_factory=SharingConfig)
    """Which layers share which tables."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which blocks have a memory."""

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
        for name in ("tucker_penalty_weight", "tucker_penalty_margin", "key_balance_weight"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"model.memory.{name} is {getattr(self, name)}: it must not be negative (0 turns it off)"
                )
        if self.key_expansion is not None and self.key_expansion < 1:
            raise ValueError(
                f"model.memory.key_expansion is {self.key_expansion}: it must be at least 1 (no expansion)"
            )
        if self.has_tucker_cores and self.value_dim % self.num_cores:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, which num_cores = {self.num_cores} does not divide: each core weights its own slice of the values"
            )
        if self.row_top_k > self.expansion * self.num_keys:
            raise ValueError(
                f"model.memory.num_keys is {self.num_keys}, but {self.row_top_k} rows are to be selected (the smaller of top_k and row_top_k_limit): raise num_keys or lower top_k"
            )
        if self.row_top_k**2 < self.top_k:
            raise ValueError(
                f"model.memory.top_k is {self.top_k}, but row_top_k_limit = {self.row_top_k_limit} leaves a grid of {self.row_top_k**2} candidates: "
                f"raise row_top_k_limit to at least {math.isqrt(self.top_k - 1) + 1}"
            )

    @property
    def has_tucker_cores(self) -> bool:
        """Whether retrieval is Tucker-decomposed; otherwise it is by product keys."""
        return self.kind in ("ultramem_v2", "ultramem")

    @property
    def has_value_projection(self) -> bool:
        """Whether a projection follows the summed values."""
        return self.value_projection if self.kind == "pkm" else self.kind != "peer"

    @property
    def has_output_gate(self) -> bool:
        """Whether a scalar per token gates the output."""
        return self.output_gate and self.kind in ("pkm", "memory_plus")

    @property
    def pre_dim(self) -> int:
        """P: columns of the pre-value table; 0 if there is none."""
        return {"ultramem_v2": self.pre_value_dim, "peer": self.value_dim}.get(self.kind, 0)

    @property
    def pre_activation(self) -> Literal["none", "gelu"]:
        """Activation of the pre-value products."""
        return "gelu" if self.kind == "peer" else self.pre_value_activation

    @property
    def query_mode(self) -> Literal["per_rank", "single"]:
        """Whether each Tucker rank has its own queries."""
        return self.query if self.kind == "ultramem_v2" else "single"

    @property
    def expansion(self) -> int:
        """e: keys per side over the square root of the rows that they address."""
        if not self.has_tucker_cores:
            return 1
        return self.key_expansion if self.key_expansion is not None else {"ultramem": 2}.get(self.kind, 1)

    @property
    def num_value_blocks(self) -> int:
        """B: virtual blocks with a value projection each."""
        projected = self.kind == "ultramem" or (self.kind == "ultramem_v2" and self.value_blocks == "projected")
        return self.expansion**2 if projected else 1

    @property
    def row_top_k(self) -> int:
        """Rows (and columns) that the first selection stage keeps."""
        return min(self.top_k, self.row_top_k_limit)

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether any auxiliary loss is switched on."""
        return self.tucker_penalty_weight > 0 or self.key_balance_weight > 0

    @property
    def num_queries(self) -> int:
        """Query vectors per token, for all heads together."""
        if not self.has_tucker_cores:
            return 2 * self.num_heads
        return 2 * self.tucker_rank if self.query_mode == "per_rank" else 2


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts as the feed-forward of every block: Megatron's own, with OLMoE's figures as the defaults."""

    num_experts: int = 64
    """E: experts per block."""
    top_k: int = 8
    """Experts per token."""
    expert_ffn_hidden_size: int = 32
    """Inner width of one expert's SwiGLU."""
    renormalise: bool = False
    """Divide the weights of a token's experts by their sum; OLMoE uses the softmax over all experts as it is."""
    balance_loss_weight: Annotated[float, Role.RUNNING] = 0.01
    """Weight of the load-balancing loss, E sum_e f_e P_e over the tokens of a microbatch, per block (1 where all experts are used alike)."""
    z_loss_weight: Annotated[float, Role.RUNNING] = 0.001
    """Weight of the router's z-loss, the mean squared log-sum-exp of its logits, per block."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "expert_ffn_hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.moe.{name} is {getattr(self, name)}: it must be at least 1")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"model.moe.top_k is {self.top_k}, more than num_experts = {self.num_experts}: lower it, or raise num_experts"
            )
        if self.top_k == 1 and self.renormalise:
            raise ValueError(
                "model.moe.renormalise is true with top_k = 1, where every weight would be 1 and the router would not learn: set it to false"
            )
        for name in ("balance_loss_weight", "z_loss_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.moe.{name} is {getattr(self, name)}: it must not be negative (0 turns it off)")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer (RMSNorm, SwiGLU, RoPE), with or without memory layers."""

    num_layers: Annotated[int, Role.IDENTITY] = 4
    """L: transformer blocks."""
    hidden_size: Annotated[int, Role.IDENTITY] = 128
    """D: width of the residual stream."""
    num_attention_heads: Annotated[int, Role.IDENTITY] = 4
    """Query heads."""
    num_query_groups: Annotated[int | None, Role.IDENTITY] = None
    """Key/value heads (grouped-query attention); null: one per query head."""
    head_dim: Annotated[int | None, Role.IDENTITY] = None
    """Width of one attention head; null: hidden_size / num_attention_heads."""
    ffn_hidden_size: Annotated[int, Role.IDENTITY, EffectiveWhen(lambda c: c.moe is None, "model.moe is null")] = 256
    """Inner width of the SwiGLU feed-forward (the true width, not the fused up + gate one)."""
    vocab_size: Annotated[int | None, Role.IDENTITY] = None
    """Token ids of the embedding before padding; null: what the tokenizer of the data set has."""
    vocab_size_multiple: Annotated[int, Role.IDENTITY] = 128
    """The embedding's rows are padded to a multiple of this, whatever the layout."""
    tied_embeddings: Annotated[bool, Role.IDENTITY] = True
    """Use the input embedding as the output projection."""
    qk_norm: Annotated[bool, Role.IDENTITY] = True
    """RMS-normalise queries and keys per head before RoPE."""
    norm_epsilon: Annotated[float, Role.IDENTITY] = 1e-5
    """Added to the mean square in every RMSNorm of the backbone and the memory."""
    rotary_base: Annotated[int, Role.RUNNING] = 10000
    """RoPE base theta."""
    init_std: Annotated[float | None, Role.IDENTITY] = None
    """Standard deviation of the initial linear weights and embeddings; null: sqrt(2 / (5 hidden_size))."""
    implementation: Annotated[Literal["local", "transformer_engine"], Role.RUNNING] = "local"
    """Attention, norms and linears: Megatron's local layers with PyTorch SDPA, or Transformer Engine's."""
    moe: Annotated[MoEConfig | None, Role.IDENTITY] = None
    """A mixture of experts in place of the dense feed-forward; null: the dense one."""
    memory: Annotated[MemoryConfig | None, Role.IDENTITY] = None
    """The memory layers; null: a model without."""

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
        if self.memory is not None:
            self._check_sharing(self.memory.sharing, self.num_memory_layers)
            replaces_all = self.memory.placement.position == "instead" and self.num_memory_layers == self.num_layers
            if self.moe is not None and self.memory.placement.spans is None and replaces_all:
                raise ValueError(
                    "model.memory.placement.position is instead in every block, which leaves no feed-forward for model.moe: use position: beside, or fewer blocks"
                )
            if self.moe is not None and self.memory.has_tucker_cores and self.memory.initialisation == "matched":
                raise ValueError(
                    "model.memory.initialisation is matched, which is to the variance of a dense SwiGLU, but model.moe is set: use paper or released"
                )
            if not self.memory.has_value_projection and self.memory.value_dim != self.hidden_size:
                raise ValueError(
                    f"model.memory.value_dim is {self.memory.value_dim}, but kind {self.memory.kind} has no value projection: "
                    f"set it to hidden_size = {self.hidden_size}"
                    + (", or value_projection to true" if self.memory.kind == "pkm" else "")
                )

    @staticmethod
    def _check_sharing(sharing: SharingConfig, num_memory_layers: int) -> None:
        if sharing.pattern != "none" and sharing.group > num_memory_layers:
            raise ValueError(
                f"model.memory.sharing.group is {sharing.group}, more than the {num_memory_layers} memory layers that num_layers and placement give"
            )
        if sharing.pattern == "block" and num_memory_layers % sharing.group:
            raise ValueError(
                f"model.memory.sharing.group is {sharing.group}, which does not divide the {num_memory_layers} memory layers that num_layers and placement give"
            )

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        return self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads

    @property
    def memory_spans(self) -> tuple[Span, ...]:
        """The memory layers by memory index: where each reads, and where it adds."""
        return resolve_placement(self.memory.placement, self.num_layers) if self.memory is not None else ()

    @property
    def num_memory_layers(self) -> int:
        """L of sharing (Eq. 8 and Table 7): layers with a memory, which in UltraMemV2 are all blocks. (The L of Eq. 26 counts blocks.)"""
        return count_memory_layers(self.memory.placement, self.num_layers) if self.memory is not None else 0

    @property
    def active_ffn_width(self) -> int:
        """Inner width of the feed-forward that one token passes: that of the dense one, or of its experts together."""
        return self.ffn_hidden_size if self.moe is None else self.moe.top_k * self.moe.expert_ffn_hidden_size

    @property
    def linear_std(self) -> float:
        """Standard deviation of initial linear weights, sqrt(2 / 5D) unless set."""
        return self.init_std if self.init_std is not None else math.sqrt(2 / (5 * self.hidden_size))
