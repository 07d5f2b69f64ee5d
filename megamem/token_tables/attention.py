"""Attention whose values, or the latents that they are made of, pass through a memory before a cache gets them.

Legend: s tokens of a sequence on this rank and t of them between tensor-parallel regions, b sequences, D hidden size, n
query heads and g key/value heads of this tensor-parallel rank, d head dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megamem.attention.kv_cache import CachingSelfAttention
from megamem.attention.latents import LatentAttention
from megamem.backbone.parts import BlockParts, Parts, Site
from megamem.blocks.memory_sites import MemorySite
from megamem.chunk.inputs import Inputs


def edit_values(block: BlockParts, site: Site, parts: Parts) -> None:
    """Put the memory into attention, plain or latent."""
    attention: Any = block.self_attention
    attention.params["site"] = site
    attention.module = AttentionWithMemory if parts.latent is None else LatentAttentionWithMemory


class AttentionWithMemory(CachingSelfAttention, MemorySite):
    """Attention whose values pass through a memory (`VALUES`), before a cache gets them.

    The inputs come as Megatron's `attention_bias`, an argument of self-attention that our cores have no use for.
    """

    def __init__(self, *args: Any, site: Site, **megatron: Any) -> None:
        super().__init__(*args, **megatron)
        self.memory = site.make_memory()
        # [g, d]
        self._values_of_token: tuple[Any, Any] = (
            self.num_query_groups_per_partition,
            self.hidden_size_per_attention_head,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, attention_bias: Inputs, **megatron: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention, [t, b, D], of the normalised input [t, b, D], and a bias (None)."""
        # Megatron passes `key_value_states` on to what makes queries, keys and values; self-attention has none.
        out, bias = super().forward(hidden_states, attention_mask, key_value_states=attention_bias, **megatron)
        return out, bias

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Inputs, output_gate: bool = False, split_qkv: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Megatron's queries [s, b, n, d], keys and values [s, b, g, d], the latter as the memory returns them."""
        assert not output_gate
        assert split_qkv
        query, key, value = super().get_query_key_value_tensors(hidden_states)
        return query, key, self.memory(value, key_value_states, hidden_states) if self.memory_enabled else value

    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """See `MemorySite.serve`."""
        self.memory(no_token.new_empty(0, 1, *self._values_of_token), inputs, no_token)


class LatentAttentionWithMemory(LatentAttention, MemorySite):
    """Latent attention whose latents pass through a memory, for values alone (`VALUES`) or for keys too
    (`LATENTS`)."""

    def __init__(self, *args: Any, site: Site, **others: Any) -> None:
        super().__init__(*args, **others)
        self.memory, self.splits_latents = site.make_memory(), site.plan.splits_latents

    def latents(self, latents: Tensor, inputs: Inputs | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `LatentAttention.latents`."""
        assert inputs is not None
        if not self.memory_enabled:
            return latents, latents
        mixed = self.memory(latents, inputs.share(self.tp_group) if self._splits else inputs, hidden)
        return (latents if self.splits_latents else mixed), mixed

    def serve(self, no_token: Tensor, inputs: Inputs) -> None:
        """See `MemorySite.serve`."""
        self.memory(no_token.new_empty(0, 1, self.widths[0]), inputs, no_token)
