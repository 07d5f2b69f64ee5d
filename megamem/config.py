"""Configuration of a model: its backbone and its memory. The docstring under a field is its help text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megamem.config_base import Config, EffectiveWhen, LossWeight
from megamem.identity import Role
from megamem.memory_config import Backbone, MemoryConfig
from megamem.rotary_config import RotaryScalingConfig
from megamem.sharing import SharingPlan
from megamem.spans import Span, count_memory_layers, resolve_placement


@dataclass(frozen=True)
class MoEConfig(Config):
    """A mixture of experts as the feed-forward of every block: Megatron's own, with OLMoE's figures as the defaults."""

    num_experts: PositiveInt = 64
    """E: experts per block."""
    top_k: PositiveInt = 8
    """Experts per token."""
    expert_ffn_hidden_size: PositiveInt = 32
    """Inner width of one expert's SwiGLU."""
    renormalise: bool = False
    """Divide the weights of a token's experts by their sum; OLMoE uses the softmax over all experts as it is."""
    balance_loss_weight: LossWeight = 0.01
    """Weight of the load-balancing loss, E sum_e f_e P_e, per block (1 where all experts are used alike)."""
    balance_sequences: Annotated[
        PositiveInt, Role.RUNNING, EffectiveWhen(lambda c: c.balance_loss_weight > 0, "balance_loss_weight is above 0")
    ] = 1
    """Consecutive sequences over which f and P of that loss are taken; a divisor of train.micro_batch_size, all of which
    Megatron's aux_loss takes."""
    z_loss_weight: LossWeight = 0.001
    """Weight of the router's z-loss, the mean squared log-sum-exp of its logits, per block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.num_experts:
            raise ValueError(
                f"model.moe.top_k is {self.top_k}, more than num_experts = {self.num_experts}: lower it, or raise "
                "num_experts"
            )
        if self.top_k == 1 and self.renormalise:
            raise ValueError(
                "model.moe.renormalise is true with top_k = 1, where every weight would be 1 and the router would not "
                "learn: set it to false"
            )


@dataclass(frozen=True)
class LatentAttentionConfig(Config):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of one narrow
    latent per token, and a key that all heads share carries the positions."""

    latent_dim: PositiveInt = 32
    """d_c: width of a token's latent."""
    rotary_dim: NonNegativeInt = 16
    """Columns of queries and keys, out of head_dim, that RoPE turns; those of keys are shared by all heads and made of
    the hidden state. 0: the causal mask alone tells positions."""
    query_latent_dim: PositiveInt | None = None
    """d_c': width of another latent of the token, which queries are made of; null: they are made of the hidden state."""


@dataclass(frozen=True)
class ModelConfig(Config):
    """A decoder-only transformer (RMSNorm, SwiGLU, RoPE), with or without memory layers."""

    num_layers: Annotated[PositiveInt, Role.IDENTITY] = 4
    """L: transformer blocks."""
    hidden_size: Annotated[PositiveInt, Role.IDENTITY] = 128
    """D: width of the residual stream."""
    num_attention_heads: Annotated[PositiveInt, Role.IDENTITY] = 4
    """Query heads."""
    num_query_groups: Annotated[PositiveInt | None, Role.IDENTITY] = None
    """Key/value heads (grouped-query attention), not with latent_attention; null: one per query head."""
    head_dim: Annotated[PositiveInt | None, Role.IDENTITY] = None
    """Width of one attention head; null: hidden_size / num_attention_heads."""
    latent_attention: Annotated[LatentAttentionConfig | None, Role.IDENTITY] = None
    """Keys and values made of one latent per token (multi-head latent attention); null: projections of their own."""
    ffn_hidden_size: Annotated[
        PositiveInt,
        Role.IDENTITY,
        EffectiveWhen(lambda c: c.moe is None, "model.moe is null"),
        EffectiveWhen(lambda c: c.num_ffn_blocks > 0, "model.memory.placement leaves a block with a feed-forward"),
    ] = 256
    """Inner width of the SwiGLU feed-forward (the true width, not the fused up + gate one)."""
    vocab_size: Annotated[PositiveInt | None, Role.IDENTITY] = None
    """Token ids of the embedding before padding; null: what the tokenizer of the data set has."""
    vocab_size_multiple: Annotated[PositiveInt, Role.IDENTITY] = 128
    """The embedding's rows are padded to a multiple of this, whatever the layout."""
    tied_embeddings: Annotated[bool, Role.IDENTITY] = True
    """Use the input embedding as the output projection."""
    qk_norm: Annotated[bool, Role.IDENTITY] = True
    """RMS-normalise queries and keys per head before RoPE; with model.latent_attention the latents, and neither."""
    norm_epsilon: Annotated[PositiveFloat, Role.IDENTITY] = 1e-5
    """Added to the mean square in every RMSNorm of the backbone and the memory."""
    rotary_base: Annotated[
        PositiveInt, Role.RUNNING, EffectiveWhen(lambda c: c.rotary_width > 0, "latent_attention.rotary_dim is above 0")
    ] = 10000
    """RoPE base theta."""
    rotary_scaling: Annotated[
        RotaryScalingConfig | None,
        Role.RUNNING,
        EffectiveWhen(lambda c: c.rotary_width > 0, "latent_attention.rotary_dim is above 0"),
    ] = None
    """Lower frequencies of RoPE, for longer sequences than before; null: those of rotary_base."""
    init_std: Annotated[PositiveFloat | None, Role.IDENTITY] = None
    """Standard deviation of the initial linear weights and embeddings; null: sqrt(2 / (5 hidden_size))."""
    implementation: Annotated[Literal["local", "transformer_engine"], Role.RUNNING] = "local"
    """Attention, norms and linears: Megatron's local layers with PyTorch SDPA, or Transformer Engine's."""
    moe: Annotated[MoEConfig | None, Role.IDENTITY] = None
    """A mixture of experts in place of the dense feed-forward; null: the dense one."""
    memory: Annotated[MemoryConfig | None, Role.IDENTITY] = None
    """The memory layers; null: a model without."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"model.hidden_size is {self.hidden_size}, which num_attention_heads = {self.num_attention_heads} does "
                "not divide: change one, or set model.head_dim"
            )
        if self.latent_attention is not None:
            self._check_latents(self.latent_attention)
        elif self.attention_head_dim % 2:
            raise ValueError(f"the width of an attention head is {self.attention_head_dim}: RoPE needs an even one")
        if self.rotary_scaling is not None:
            if self.rotary_scaling.kind == "ntk" and self.rotary_width == 2:
                raise ValueError(
                    "model.rotary_scaling.kind is ntk, which lowers all frequencies but the highest, and heads of width 2 "
                    "have one frequency only: use linear"
                )
            if self.rotary_scaling.kind == "yarn" and self.rotary_base == 1:
                raise ValueError(
                    "model.rotary_scaling.kind is yarn, which scales high and low frequencies differently, and with "
                    "model.rotary_base = 1 all are equal: raise rotary_base"
                )
        if self.num_attention_heads % self.query_groups:
            raise ValueError(
                f"model.num_query_groups is {self.num_query_groups}, which does not divide num_attention_heads = "
                f"{self.num_attention_heads}"
            )
        if self.memory is not None:
            if self.moe is not None and self.num_ffn_blocks == 0:
                where = f"placement.position is {self.memory.placement.position}"
                raise ValueError(
                    f"model.memory.{where if self.memory.slot is None else f'kind is {self.memory.kind}'} in every block, "
                    "which leaves no feed-forward for model.moe: use position: beside, or fewer blocks"
                )
            self.memory.check(
                Backbone(
                    hidden_size=self.hidden_size,
                    num_heads=self.num_attention_heads,
                    query_groups=self.query_groups,
                    head_dim=self.attention_head_dim,
                    latent_dim=None if self.latent_attention is None else self.latent_attention.latent_dim,
                    vocab_size=self.vocab_size,
                    num_memory_layers=self.num_memory_layers,
                    has_experts=self.moe is not None,
                )
            )

    def _check_latents(self, latent: LatentAttentionConfig) -> None:
        if latent.rotary_dim % 2 or latent.rotary_dim >= self.attention_head_dim:
            raise ValueError(
                f"model.latent_attention.rotary_dim is {latent.rotary_dim}: RoPE needs an even number of columns, and "
                f"fewer than the {self.attention_head_dim} of a head"
            )
        if self.implementation != "local":
            raise ValueError(
                f"model.implementation is {self.implementation}, but model.latent_attention is that of local layers: use "
                "model.implementation: local"
            )
        if self.num_query_groups is not None:
            raise ValueError(
                f"model.num_query_groups is {self.num_query_groups}, but model.latent_attention makes a key and a value "
                "for every head: leave num_query_groups out"
            )
        if self.rotary_scaling is not None and self.rotary_scaling.kind == "yarn":
            raise ValueError(
                "model.rotary_scaling.kind is yarn, whose attention_factor is for whole rotated queries and keys, and "
                "model.latent_attention rotates a part of them: use ntk, linear or llama3"
            )
        if self.memory is not None and self.memory.slot is not None and self.memory.slot.needs_plain_attention:
            raise ValueError(
                f"model.memory.kind is {self.memory.kind}, whose memories read the outputs of plain attention's heads: set "
                "model.latent_attention: null, or choose another memory"
            )

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """Columns of a head's queries and keys that RoPE turns."""
        return self.attention_head_dim if self.latent_attention is None else self.latent_attention.rotary_dim

    @property
    def query_groups(self) -> int:
        return self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads

    @property
    def memory_spans(self) -> tuple[Span, ...]:
        """The memory layers by memory index: where each reads, and where it adds."""
        return resolve_placement(self.memory.placement, self.num_layers) if self.memory is not None else ()

    @property
    def num_ffn_blocks(self) -> int:
        """Blocks with a feed-forward, which memories in its place and inserted blocks do not have."""
        if self.memory is None:
            return self.num_layers
        if self.memory.placement.spans is None:
            # All memories act alike, each in its own block; a list of them would be as long as the model is deep.
            return self.num_layers - (0 if self.memory.slot_of(Span(0, 0)).has_ffn else self.num_memory_layers)
        return self.num_layers - sum(not self.memory.slot_of(span).has_ffn for span in self.memory_spans)

    @property
    def num_memory_layers(self) -> int:
        """L of sharing (Eq. 8 and Table 7): layers with a memory, which in UltraMemV2 are all blocks. (The L of Eq. 26
        counts blocks.)"""
        return count_memory_layers(self.memory.placement, self.num_layers) if self.memory is not None else 0

    @property
    def memory_plan(self) -> SharingPlan:
        """The banks of all memory layers, and what each sees of which; empty without a memory. Where tables are as large
        as the vocabulary and `vocab_size` is left to a tokenizer, they have no rows yet."""
        memory = self.sized_memory
        return SharingPlan((), ()) if memory is None else memory.plan(self.num_memory_layers)

    @property
    def sized_memory(self) -> MemoryConfig | None:
        """The memory with what follows from the number of token ids, where that is known."""
        if self.memory is None or self.vocab_size is None:
            return self.memory
        return self.memory.sized(self.vocab_size)

    def memory_name(self, index: int) -> str:
        """The global name of a memory layer, which stands in the block that it reads in."""
        assert self.memory is not None
        span = self.memory_spans[index]
        return f"decoder.layers.{span.read}.{self.memory.slot_of(span).module}.memory"

    @property
    def balanced_sequences(self) -> dict[str, int]:
        """By key, of how many sequences of a microbatch a loss that is switched on takes its statistics together."""
        found = {}
        if self.memory is not None and self.memory.loss_weights.key_balance > 0:
            found["model.memory.key_balance_sequences"] = self.memory.loss_weights.balance_sequences
        if self.moe is not None and self.moe.balance_loss_weight > 0:
            found["model.moe.balance_sequences"] = self.moe.balance_sequences
        return found

    @property
    def active_ffn_width(self) -> int:
        """Inner width of the feed-forward that one token passes: that of the dense one, or of its experts together."""
        return self.ffn_hidden_size if self.moe is None else self.moe.top_k * self.moe.expert_ffn_hidden_size

    @property
    def linear_std(self) -> float:
        """Standard deviation of initial linear weights, sqrt(2 / 5D) unless set."""
        return self.init_std if self.init_std is not None else math.sqrt(2 / (5 * self.hidden_size))
