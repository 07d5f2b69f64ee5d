"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), of Megatron's parallel linears and its attention's forward
pass.

c = x W_DKV is a token's latent, of which one up-projection makes keys and values of all heads; the last columns of every
key are a rotary key, made of x beside the latent and the same for all heads. Queries are made of x, or of a latent of
their own. Megatron's own module is not taken because

- it gathers the rotary key of its local linears so that the gradient is that of one tensor-parallel rank's heads alone,
  and cannot be built where Transformer Engine is absent (megatron-core 0.16.1);
- it turns by the place in the sequence, and documents may have places of their own;
- a memory may mix the latents, which it makes and uses in one piece.

A cache holds latents, as they were mixed, and turned rotary keys: C + r columns per token and layer, or 2 C + r where a
memory mixes those of values alone, against 2 n d of keys and values. No cached latent is projected again: the
up-projection of keys is applied to the new token's queries instead, and that of values to what the heads have read
(DeepSeek-V2, section 2.1.2).

Legend: s tokens of a sequence on this context-parallel rank and t of them on this tensor-parallel rank, k tokens of a
cache, b sequences, D hidden size, n heads of this tensor-parallel rank, d columns of a head of which r are rotary,
C = d_c columns of a latent and Q = d_c' of one of queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, gather_from_sequence_parallel_region
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from kernels.rotated_heads.op import RotatedHeads
from megamem.attention.core import SdpaCoreAttention, last_token_attention
from megamem.attention.kv_cache import KeyValueCache
from megamem.chunk.inputs import Inputs
from megamem.config.model import LatentAttentionConfig


@dataclass
class LatentAttentionSubmodules:
    """Modules for the slots of latent attention.

    Attributes:
        linear: linear of queries, of latents with rotary keys, and of keys and values; tensor-parallel ranks split its
            columns.
        layernorm: norm of latents.
        core_attention: attention of heads (`megamem.attention.core`).
        linear_proj: linear of outputs; tensor-parallel ranks split its rows.
    """

    linear: Callable[..., nn.Module]
    layernorm: Callable[..., nn.Module]
    core_attention: Callable[..., nn.Module]
    linear_proj: Callable[..., nn.Module]


class LatentAttention(Attention):
    """Attention whose keys and values are made of latents, built and called as Megatron's attention is."""

    tp_group: torch.distributed.ProcessGroup
    core_attention: SdpaCoreAttention

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentAttentionSubmodules,
        layer_number: int,
        *,
        latent: LatentAttentionConfig,
        rotated_heads: RotatedHeads | None,
        **megatron: Any,
    ) -> None:
        """
        Args:
            rotated_heads: turns heads (`megamem.attention.kv_cache.CachingSelfAttention`); they are not normalised.
        """
        super().__init__(
            config=config, submodules=submodules, layer_number=layer_number, attention_type="self", **megatron
        )
        self._rotated_heads = rotated_heads
        heads, head = config.num_attention_heads, self.hidden_size_per_attention_head
        # C and r.
        self.widths = (latent.latent_dim, latent.rotary_dim)
        linear = partial(
            submodules.linear,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
        self.linear_kv_down_proj = linear(config.hidden_size, sum(self.widths))
        # For each head its key's d - r columns, then its value.
        self.linear_kv_up_proj = linear(latent.latent_dim, heads * (2 * head - latent.rotary_dim))
        layernorm = partial(submodules.layernorm, config=config, eps=config.layernorm_epsilon)
        self.kv_layernorm = layernorm(hidden_size=latent.latent_dim)
        # Megatron asks whether norms of queries and keys are in the way of a fusion.
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm = None
        if latent.query_latent_dim is None:
            self.linear_q_proj = linear(config.hidden_size, heads * head)
        else:
            self.linear_q_down_proj = linear(config.hidden_size, latent.query_latent_dim)
            self.q_layernorm = layernorm(hidden_size=latent.query_latent_dim)
            self.linear_q_up_proj = linear(latent.query_latent_dim, heads * head)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None = None,
        attention_bias: Inputs | None = None,
        inference_context: KeyValueCache | None = None,
        **megatron: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention, [t, b, D], of the normalised input [t, b, D], and a bias (None).

        `rotary_pos_emb` are `megamem.attention.rotary.rotary_turns` [s, 1 or b, 2, r], or angles [s, 1 or b, 1, r] in
        radians where Megatron turns; `attention_bias` is the microbatch's inputs, where a
        memory mixes latents.
        """
        if inference_context is not None and inference_context.num_tokens:
            return self._forward_next(hidden_states, rotary_pos_emb, attention_bias, inference_context)
        # Megatron would turn whole heads. It passes `key_value_states` on to what makes queries, keys and values.
        out, bias = super().forward(
            hidden_states,
            attention_mask,
            key_value_states=(rotary_pos_emb, attention_bias, inference_context),
            **megatron,
        )
        return out, bias

    def _forward_next(
        self, hidden: Tensor, turns: Tensor | None, inputs: Inputs | None, cache: KeyValueCache
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` for one token [1, b, D] that follows those of a cache."""
        latents, rotary_keys = self._compressed(hidden)
        of_keys, of_values = self.latents(self.kv_layernorm(latents), inputs, hidden)
        head, rotary_dim = self.hidden_size_per_attention_head, self.widths[1]
        # [n, d - r, C] and [n, d, C].
        up_projection = self.linear_kv_up_proj.get_parameter("weight")
        by_heads = up_projection.unflatten(0, (self.num_attention_heads_per_partition, -1))
        to_keys, to_values = by_heads.split([head - rotary_dim, head], 1)
        queries = self._queries(hidden)
        plain, rotary = queries.split([head - rotary_dim, rotary_dim], 3)
        rotary, shared = self._turned(rotary, rotary_keys.unsqueeze(2), turns)
        keys, values = self._cached(cache, of_keys, of_values, shared)
        queries_of_latents = torch.einsum("sbnk,nkc->sbnc", plain, to_keys)
        read = last_token_attention(
            torch.cat((queries_of_latents, rotary), 3),
            keys.unsqueeze(2),
            values.unsqueeze(2),
            self.core_attention.scale_of(queries),
        )
        heads = torch.einsum("sbnc,nvc->sbnv", self._by_heads(read), to_values)
        out, bias = self.linear_proj(heads.flatten(2))
        return out, bias

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: tuple[Tensor | None, Inputs | None, KeyValueCache | None],
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [s, b, n, d] of `hidden_states` [t, b, D]; `key_value_states` is from `forward`."""
        assert not output_gate
        assert split_qkv
        turns, inputs, cache = key_value_states
        latents, rotary_keys = self._compressed(hidden_states)
        of_keys, of_values = self.latents(self.kv_layernorm(latents), inputs, hidden_states)
        keys, values = self._up_projected(of_keys, of_values)
        queries = self._queries(hidden_states)
        rotary_dim, shared = self.widths[1], rotary_keys.unsqueeze(2)
        if rotary_dim:
            if self._splits:
                # Backward adds up what the heads of all ranks say of a token's.
                shared = gather_from_sequence_parallel_region(rotary_keys, group=self.tp_group).unsqueeze(2)
            plain, rotary = queries.split([queries.shape[3] - rotary_dim, rotary_dim], 3)
            rotary, shared = self._turned(rotary, shared, turns)
            queries = torch.cat((plain, rotary), 3)
            keys = torch.cat((keys, shared.expand(-1, -1, keys.shape[2], -1)), 3)
        if cache is not None:
            self._cached(cache, of_keys, of_values, shared)
        return queries, keys, values

    def latents(self, latents: Tensor, inputs: Inputs | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Latents that keys are made of, and those that values are, of the tokens' normalised ones [t, b, C]."""
        return latents, latents

    def _turned(self, queries: Tensor, keys: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotary columns of queries [s, b, n, r] and of the heads' common key [s, b, 1, r], turned."""
        if not self.widths[1]:
            return queries, keys
        assert turns is not None
        if self._rotated_heads is not None:
            return self._rotated_heads(queries, keys, turns, None, None, 0.0)
        turned, shared = (
            apply_rotary_pos_emb(x, turns, config=self.config, cp_group=self.pg_collection.cp) for x in (queries, keys)
        )
        return turned, shared

    def _cached(
        self, cache: KeyValueCache, of_keys: Tensor, of_values: Tensor, rotary_keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Latents with rotary keys [k, b, C + r], and latents that values are made of [k, b, C], of all tokens so far; of
        the new ones' latents [t, b, C] and turned rotary keys [t, b, 1, r]."""
        whole = torch.cat((of_keys, rotary_keys.squeeze(2)), 2)
        if of_keys is of_values:
            (keys,) = cache.extend(self.layer_number, whole)
            return keys, keys[..., : self.widths[0]]
        keys, values = cache.extend(self.layer_number, whole, of_values)
        return keys, values

    @property
    def _splits(self) -> bool:
        """True if other tensor-parallel ranks have other tokens."""
        return bool(self.config.sequence_parallel) and self.tp_group.size() > 1

    def _compressed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [t, b, C] and rotary keys [t, b, r] of this rank's tokens."""
        latents, rotary_keys = self._down_projected(self.linear_kv_down_proj, hidden).split(self.widths, 2)
        return latents, rotary_keys

    def _queries(self, hidden: Tensor) -> Tensor:
        """[s, b, n, d], before they are turned, of this rank's tokens [t, b, D]."""
        if self.q_layernorm is None:
            return self._by_heads(self.linear_q_proj(hidden)[0])
        latents = self.q_layernorm(self._down_projected(self.linear_q_down_proj, hidden))
        return self._by_heads(self.linear_q_up_proj(latents)[0])

    def _down_projected(self, linear: nn.Module, hidden: Tensor) -> Tensor:
        """All columns of this rank's tokens, [t, b, C + r] or [t, b, Q]."""
        columns: Tensor = linear(hidden)[0]
        if self._splits:
            # From some columns of all tokens.
            columns = all_to_all_hp2sp(columns, self.tp_group).view(*hidden.shape[:2], -1)
        return columns

    def _up_projected(self, of_keys: Tensor, of_values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys without their rotary columns [s, b, n, d - r] and values [s, b, n, d], of latents [t, b, C] each."""
        head = self.hidden_size_per_attention_head
        widths = [head - self.widths[1], head]
        if of_keys is of_values:
            keys, values = self._by_heads(self.linear_kv_up_proj(of_keys)[0]).split(widths, 3)
            return keys, values
        # One projection makes both, so that each of the two leaves a part unused.
        both = self._by_heads(self.linear_kv_up_proj(torch.cat((of_keys, of_values), 1))[0])
        from_keys, from_values = both.chunk(2, 1)
        return from_keys.split(widths, 3)[0], from_values.split(widths, 3)[1]

    def _by_heads(self, x: Tensor) -> Tensor:
        """[s, b, n, columns of a head] of [s, b, n columns]."""
        return x.unflatten(2, (self.num_attention_heads_per_partition, -1))
