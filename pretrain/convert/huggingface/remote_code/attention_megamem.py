"""Norms, rotary positions, and causal self-attention: with keys and values of their own, or made of latents.

Legend: b sequences, s tokens of each, D hidden size, n query heads, d width of a head of which r columns are rotary, C
columns of a latent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_megamem import MegamemConfig
from .memory_megamem import rms_normalise

# Values, or latents, [b, s, columns] and attention's input [b, s, D], to what a memory makes of the former.
Mix = Callable[[Tensor, Tensor], Tensor]


class MegamemRMSNorm(nn.Module):
    """Root-mean-square norm with a gain."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        # Engines know such a module by its class's name, read this, and put their own norm there.
        self.eps = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalise(x, self.weight, self.eps)


class MegamemLayerNorm(nn.Module):
    """Layer normalisation with a gain and a bias, in at least fp32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gain, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), gain.shape, gain, bias, self.epsilon).to(x.dtype)


def rotations(positions: Tensor, config: MegamemConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [b, 1, s, d], or with latents [b, 1, s, r], of RoPE at positions [b, s]."""
    kind, factor = config.rope_parameters["rope_type"], 1.0
    width = config.head_dim if config.latent_attention is None else config.latent_attention["rotary_dim"]
    if kind == "default" or not width:
        steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / config.rope_parameters["rope_theta"] ** (steps / max(width, 1))
    else:
        turned = copy.copy(config)
        turned.head_dim = width
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](turned, positions.device)
    angles = (positions.unsqueeze(-1).float() * frequencies).repeat(1, 1, 2).unsqueeze(1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of [b, heads, s, d]: the first half of d is turned with the second."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention step by step, [b, s, heads, d], and its weights [b, heads, s, keys]; the mask is added to the scores."""
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * options["scaling"]
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class MegamemAttention(nn.Module):
    """Causal self-attention with grouped queries; of some inserted blocks without an output projection."""

    def __init__(self, config: MegamemConfig, layer_idx: int, *, projects: bool) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.scaling, self.is_causal = config.head_dim**-0.5, True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False) if projects else nn.Identity()
        self.q_norm = MegamemRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = MegamemRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | None,
        mix: Mix | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[b, s, D] of [b, s, D], and attention's weights where its implementation has them; a memory may mix values."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x)
        if mix is not None:
            v = mix(v, x)
        v = v.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), *position_embeddings)
        k = rotate(self.k_norm(k).transpose(1, 2), *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        # Engines look for this name and this call, and put their own attention there.
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, weights = attention_interface(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), weights


class MegamemDownProjection(nn.Module):
    """A linear projection that is whole on every rank. No linear layer: engines join and split those of one input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class MegamemLatentAttention(nn.Module):
    """Multi-head latent attention: keys and values of all heads are made of one latent per token, and the last r columns
    of every key are a rotary key of all heads. A cache holds the keys and values of heads."""

    def __init__(self, config: MegamemConfig, layer_idx: int, *, projects: bool, mixes_keys: bool) -> None:
        super().__init__()
        latent, hidden, heads = config.latent_attention, config.hidden_size, config.num_attention_heads
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.scaling, self.is_causal, self.num_key_value_groups = config.head_dim**-0.5, True, 1
        self.mixes_keys, self.widths = mixes_keys, (latent["latent_dim"], latent["rotary_dim"])
        self.kv_down_proj = MegamemDownProjection(hidden, sum(self.widths))
        # For each head its key's d - r columns, then its value.
        self.kv_up_proj = nn.Linear(self.widths[0], heads * (2 * config.head_dim - self.widths[1]), bias=False)
        self.kv_norm = MegamemRMSNorm(self.widths[0], config.rms_norm_eps) if config.qk_norm else nn.Identity()
        narrow = latent["query_latent_dim"]
        self.q_proj = nn.Linear(hidden if narrow is None else narrow, heads * config.head_dim, bias=False)
        self.q_down_proj = nn.Identity() if narrow is None else MegamemDownProjection(hidden, narrow)
        has_norm = narrow is not None and config.qk_norm
        self.q_norm = MegamemRMSNorm(narrow, config.rms_norm_eps) if has_norm else nn.Identity()
        self.o_proj = nn.Linear(heads * config.head_dim, hidden, bias=False) if projects else nn.Identity()

    def forward(
        self,
        x: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | None,
        mix: Mix | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See `MegamemAttention`; a memory may mix the latents of values, or those of keys too."""
        latents, rotary_key = self.kv_down_proj(x).split(self.widths, -1)
        latents = self.kv_norm(latents)
        mixed = latents if mix is None else mix(latents, x)
        k, v = self._up_projected(mixed)
        if mix is not None and not self.mixes_keys:
            k, _ = self._up_projected(latents)
        q = self.q_proj(self.q_norm(self.q_down_proj(x))).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.widths[1]:
            plain, turned = q.split((self.head_dim - self.widths[1], self.widths[1]), -1)
            q = torch.cat((plain, rotate(turned, *position_embeddings)), -1)
            shared = rotate(rotary_key.unsqueeze(1), *position_embeddings)
            k = torch.cat((k, shared.expand(-1, k.shape[1], -1, -1)), -1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        # See `MegamemAttention`.
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, weights = attention_interface(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), weights

    def _up_projected(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys without their rotary columns [b, n, s, d - r] and values [b, n, s, d], of latents [b, s, C]."""
        widths = (self.head_dim - self.widths[1], self.head_dim)
        k, v = self.kv_up_proj(latents).unflatten(-1, (-1, sum(widths))).transpose(1, 2).split(widths, -1)
        return k, v
