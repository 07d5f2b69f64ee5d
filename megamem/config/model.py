"""Configuration of a model: its backbone and its memory. The docstring under a field is its help text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from annotated_types import Le
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megamem.attention.rotary_config import RotaryScalingConfig
from megamem.config.base import Advice, Config, EffectiveWhen, LossWeight
from megamem.config.identity import Role
from megamem.config.memory import Backbone, MemoryConfig
from megamem.config.width import MupConfig, WidthRules
from megamem.placement.placed import Placed, PlacedMemory, place
from megamem.placement.sharing import BankSpec, SharingPlan
from megamem.placement.spans import Span, count_memory_layers, resolve_placement
from megamem.residual_streams.config import ResidualStreamsConfig


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
class MultiTokenConfig(Config):
    """Prediction of tokens beyond the next one, in training, as DeepSeek-V3 has it (arXiv 2412.19437): for each a projection and a
    block behind the last one, without a memory, with the model's embedding and output projection."""

    depth: PositiveInt = 1
    """Tokens beyond the next one."""
    loss_weight: Annotated[PositiveFloat, Role.RUNNING] = 0.3
    """Weight of the mean over depths of their losses, beside the loss of the next token."""


@dataclass(frozen=True)
class ModelConfig(Config):
    """A decoder-only transformer (RMSNorm, SwiGLU, RoPE), with or without memory layers."""

    num_layers: Annotated[
        PositiveInt,
        Le(10_000),
        Advice("each is a block of its own, which all that plans a model goes through"),
        Role.IDENTITY,
    ] = 4
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
    qkv_bias: Annotated[
        bool, Role.IDENTITY, EffectiveWhen(lambda c: c.latent_attention is None, "model.latent_attention is null")
    ] = False
    """Add biases to queries, keys and values, as Qwen2 does; they begin at 0."""
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
    """Standard deviation of the initial linear weights and embeddings, with mup at its base; null: sqrt(2 / (5 hidden_size))."""
    mup: Annotated[MupConfig | None, Role.IDENTITY] = None
    """Initial weights and learning rates that follow hidden_size; null: rates are the same at every width."""
    implementation: Annotated[Literal["local", "transformer_engine"], Role.RUNNING] = "local"
    """Attention, norms and linears: Megatron's local layers with PyTorch SDPA, or Transformer Engine's."""
    moe: Annotated[MoEConfig | None, Role.IDENTITY] = None
    """A mixture of experts in place of the dense feed-forward; null: the dense one."""
    residual_streams: Annotated[ResidualStreamsConfig | None, Role.IDENTITY] = None
    """Several residual streams, which attention and feed-forwards read and write; null: one, to which they add."""
    multi_token_prediction: Annotated[MultiTokenConfig | None, Role.IDENTITY] = None
    """A branch that predicts further tokens in training; evaluation, generation and export leave it out. null: none."""
    memory: Annotated[MemoryConfig | None, Role.IDENTITY] = None
    """The memory layers; null: a model without."""
    second_memory: Annotated[
        MemoryConfig | None, Role.IDENTITY, EffectiveWhen(lambda c: c.memory is not None, "model.memory is set")
    ] = None
    """Memory layers of another family, in blocks that those of `memory` leave free, or in the same, where one of the two
    stands in attention and one outside of it; null: one family."""

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
        if self.moe is not None and self.multi_token_prediction is not None:
            raise ValueError(
                "model.multi_token_prediction is set with model.moe, and its blocks have no mixture of experts: set one of "
                "them to null"
            )
        if self.residual_streams is not None:
            self._check_streams()
        if self.memory is not None:
            if self.moe is not None and self.num_ffn_blocks == 0:
                where, fix = f"kind is {self.memory.kind}", "name fewer blocks in model.memory.placement"
                if self.memory.slot is None:
                    where = f"placement.position is {self.memory.placement.position}"
                    fix = "use position: beside, or fewer blocks"
                raise ValueError(
                    f"model.memory.{where} in every block, which leaves no feed-forward for model.moe: {fix}"
                )
            self._check_memory(self.memory)
            if self.second_memory is not None:
                self._check_second(self.memory, self.second_memory)
                try:
                    self._check_memory(self.second_memory)
                except ValueError as error:
                    # Families name the section that most models have alone.
                    raise ValueError(str(error).replace("model.memory.", "model.second_memory.")) from None
        if self.mup is not None:
            self._check_width(self.mup)

    def _check_streams(self) -> None:
        """Refuse parts that several streams have no place for.

        Raises:
            ValueError: the model has such a part; the message has key, value and fix.
        """
        if self.multi_token_prediction is not None:
            raise ValueError(
                "model.residual_streams is set with model.multi_token_prediction, whose branch reads one stream: set one of "
                "them to null"
            )
        for key, memory in self.families.items():
            if memory.is_inserted:
                raise ValueError(
                    f"model.residual_streams is set, but {key}, of kind {memory.kind}, is inserted blocks, which begin as "
                    "the identity where nothing mixes streams: set model.residual_streams: null, or choose another memory"
                )

    def _check_width(self, mup: MupConfig) -> None:
        """Refuse parts that have no rule for another width.

        Raises:
            ValueError: a part has no such rule; the message has key, value and fix.
        """
        for key, memory in self.families.items():
            if not memory.follows_width:
                raise ValueError(
                    f"{key}.kind is {memory.kind}, for which there is no rule of muP: set model.mup: null, or choose "
                    "another family"
                )
            if mup.base_head_dim is not None and not memory.follows_head_width:
                raise ValueError(
                    f"model.mup.base_head_dim is {mup.base_head_dim}, but {key}, of kind {memory.kind}, has weights made of "
                    "heads, and no rule for wider ones: leave it out, and give a wider model more heads (model.head_dim)"
                )
        if mup.base_head_dim is not None and (not self.qk_norm or self.latent_attention is not None):
            where = "latent_attention is set" if self.qk_norm else "qk_norm is false"
            raise ValueError(
                f"model.mup.base_head_dim is {mup.base_head_dim}, whose factor is in the gains of queries, and model.{where}: "
                "leave it out, and give a wider model more heads (model.head_dim), or use plain attention with qk_norm"
            )

    def _check_memory(self, memory: MemoryConfig) -> None:
        memory.check(
            Backbone(
                hidden_size=self.hidden_size,
                num_heads=self.num_attention_heads,
                query_groups=self.query_groups,
                head_dim=self.attention_head_dim,
                latent_dim=None if self.latent_attention is None else self.latent_attention.latent_dim,
                vocab_size=self.vocab_size,
                num_memory_layers=count_memory_layers(memory.placement, self.num_layers),
                has_experts=self.moe is not None,
            )
        )

    def _check_second(self, memory: MemoryConfig, second: MemoryConfig) -> None:
        """Refuse two families that one model cannot have.

        Raises:
            ValueError: the families do not go together; the message has key, value and fix.
        """
        if second.kind == memory.kind:
            raise ValueError(
                f"model.second_memory.kind is {second.kind}, as model.memory.kind: name its blocks in "
                "model.memory.placement, or choose another family"
            )
        for key, each in (("memory", memory), ("second_memory", second)):
            if each.is_inserted:
                raise ValueError(
                    f"model.{key}.kind is {each.kind}, whose layers are inserted blocks: such a family is the only one of "
                    "its model, leave out model.second_memory"
                )
        if memory.reads_once and second.reads_once:
            raise ValueError(
                f"model.memory.kind is {memory.kind} and model.second_memory.kind {second.kind}, and layers of both read their "
                "tables together, of which a model has those of one family: choose another one"
            )
        together = self.memory_read_once
        handing_on = [each for each in (memory, second) if each.placement.hands_on]
        if together is not None and handing_on:
            raise ValueError(
                f"model.memory.kind is {memory.kind} and model.second_memory.kind {second.kind}: blocks hand on what layers of "
                f"kind {together.kind} have read together, and nothing else: set query_group: 1, and no spans, for the other"
            )
        if len(handing_on) == 2 and any(each.placement.query_group > 1 for each in handing_on):
            raise ValueError(
                f"model.memory.placement.query_group is {memory.placement.query_group} and that of model.second_memory "
                f"{second.placement.query_group}, but blocks hand on what one family of memories reads with, and nothing "
                "else: set query_group: 1, and no spans, for one of them"
            )
        slots = (
            {s.read: each.slot_of(s) for s in resolve_placement(each.placement, self.num_layers)}
            for each in (memory, second)
        )
        one, other = slots
        for block in sorted(one.keys() & other.keys()):
            if one[block].is_in_attention == other[block].is_in_attention:
                raise ValueError(
                    f"model.memory and model.second_memory both have a layer in block {block}, which has room for one in "
                    "attention and one outside of it: name other blocks in model.second_memory.placement.blocks or "
                    "model.memory.placement.blocks"
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
            # Such a family is the only one of its model.
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
    def num_streams(self) -> int | None:
        """n: residual streams, where there are several (or a single one with sites of its own)."""
        return None if self.residual_streams is None else self.residual_streams.count

    @property
    def query_groups(self) -> int:
        return self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads

    @property
    def memory_spans(self) -> tuple[Span, ...]:
        """The memory layers by memory index: where each reads, and where it adds."""
        return tuple(layer.span for layer in self.placed.layers)

    @property
    def memories(self) -> tuple[MemoryConfig, ...]:
        """The families of memory layers: none, one or two."""
        if self.memory is None:
            return ()
        return (self.memory,) if self.second_memory is None else (self.memory, self.second_memory)

    @property
    def memory_read_once(self) -> MemoryConfig | None:
        """The family whose layers read their tables together (`MemoryConfig.reads_once`), if there is one."""
        return next((memory for memory in self.memories if memory.reads_once), None)

    @property
    def families(self) -> dict[str, MemoryConfig]:
        """The families of memory layers by the key of their section."""
        return dict(zip(("model.memory", "model.second_memory"), self.memories, strict=False))

    @property
    def memory_kinds(self) -> str:
        """Names of the families, in words; "dense" without one."""
        return " and ".join(memory.kind for memory in self.memories) or "dense"

    @property
    def num_branch_blocks(self) -> int:
        """Blocks of the branch behind the last one, which formulas number on from it."""
        return 0 if self.multi_token_prediction is None else self.multi_token_prediction.depth

    @property
    def num_ffn_blocks(self) -> int:
        """Blocks with a feed-forward, which memories in its place and inserted blocks do not have."""
        return self.num_layers - sum(
            not memory.slot_of(span).has_ffn
            for memory in self.memories
            for span in resolve_placement(memory.placement, self.num_layers)
        )

    @property
    def num_memory_layers(self) -> int:
        """L of sharing (Eq. 8 and Table 7): layers with a memory, which in UltraMemV2 are all blocks. (The L of Eq. 26
        counts blocks.)"""
        return sum(count_memory_layers(memory.placement, self.num_layers) for memory in self.memories)

    @property
    def memory_plan(self) -> SharingPlan:
        """The banks of all memory layers, and what each sees of which; empty without a memory. Where tables are as large
        as the vocabulary and `vocab_size` is left to a tokenizer, they have no rows yet."""
        return self.placed.plan

    @property
    def placed(self) -> Placed:
        """The memory layers of all families, with what follows from the number of token ids, where that is known."""
        return _placed(tuple(self._sized(memory) for memory in self.memories), self.num_layers)

    @property
    def memory_layers(self) -> tuple[PlacedMemory, ...]:
        """The memory layers by memory index."""
        return self.placed.layers

    def _sized(self, memory: MemoryConfig) -> MemoryConfig:
        return memory if self.vocab_size is None else memory.sized(self.vocab_size)

    def memory_name(self, index: int) -> str:
        """The global name of a memory layer, which stands in the block that it reads in."""
        return self.memory_layers[index].name

    def family_of_bank(self, bank: int) -> MemoryConfig:
        """The family whose layers read a bank, by the bank's number."""
        return self.placed.families[bank]

    def banks_of(self, memory: MemoryConfig) -> tuple[BankSpec, ...]:
        """The banks that a family's layers read."""
        return tuple(bank for bank in self.memory_plan.banks if self.family_of_bank(bank.index).kind == memory.kind)

    @property
    def balanced_sequences(self) -> dict[str, int]:
        """By key, of how many sequences of a microbatch a loss that is switched on takes its statistics together."""
        found = {}
        for key, memory in self.families.items():
            if memory.loss_weights.key_balance > 0:
                found[f"{key}.key_balance_sequences"] = memory.loss_weights.balance_sequences
        if self.moe is not None and self.moe.balance_loss_weight > 0:
            found["model.moe.balance_sequences"] = self.moe.balance_sequences
        return found

    @property
    def active_ffn_width(self) -> int:
        """Inner width of the feed-forward that one token passes: that of the dense one, or of its experts together."""
        return self.ffn_hidden_size if self.moe is None else self.moe.top_k * self.moe.expert_ffn_hidden_size

    @property
    def linear_std(self) -> float:
        """Standard deviation of initial linear weights whose inputs are as wide as the model: sqrt(2 / 5D) unless set."""
        if self.init_std is None:
            return math.sqrt(2 / (5 * self.hidden_size))
        return self.init_std / math.sqrt(self.width_rules.ratio)

    @property
    def narrow_std(self) -> float:
        """Standard deviation of initial embeddings, and of linear weights whose inputs are not as wide as the model."""
        return self.linear_std * math.sqrt(self.width_rules.ratio)

    @property
    def base_hidden_size(self) -> float:
        """D of the model that initial weights are defined for: this one, or that of muP's search."""
        return self.hidden_size / self.width_rules.ratio

    @property
    def width_rules(self) -> WidthRules:
        """Rules by which weights and rates follow the width; without muP they do not."""
        if self.mup is None:
            return WidthRules()
        base_head = self.mup.base_head_dim or self.attention_head_dim
        return WidthRules(self.hidden_size / self.mup.base_hidden_size, math.sqrt(base_head / self.attention_head_dim))


@lru_cache(maxsize=64)
def _placed(memories: tuple[MemoryConfig, ...], num_layers: int) -> Placed:
    return place(memories, num_layers)
