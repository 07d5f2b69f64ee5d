"""Key/value cache of a text that is being generated, so that a new token passes through the model alone.

A cache is the `inference_context` that blocks hand to Megatron's attention, which asks it what the last methods here
answer. Megatron's own (`StaticInferenceContext`) is not taken because it holds keys before they are turned, and turns all of them for every token; and because it holds
keys and values of every head, where latents are a fraction of them (`latents.py`).

Legend: t new tokens and k tokens so far, b sequences, n query heads and g key/value heads of this tensor-parallel rank,
d head dimension.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from kernels.rotated_heads.op import RotatedHeads
from megamem.backbone.norm import HeadNorm


class KeyValueCache:
    """Keys and values, or latents, of every layer, for the tokens that a model has seen.

    A model is first given any number of tokens, and then one at a time (`megamem.model.MemoryGPTModel.forward`). All
    sequences are one document each.

    Attributes:
        num_tokens: seen so far, in each sequence.
        max_sequence_length: room for so many, under the name by which Megatron asks for it.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        self.max_sequence_length = max_tokens
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self._last: dict[Hashable, Tensor] = {}

    def extend(self, layer_number: int, *new: Tensor) -> tuple[Tensor, ...]:
        """A layer's tensors [k, b, ...] of all tokens so far, of those of the new ones [t, b, ...].

        Raises:
            ValueError: the cache has no room for the new ones, or several follow tokens that are there.
        """
        start, stop = self.num_tokens, self.num_tokens + len(new[0])
        if stop > self.max_sequence_length or (start and stop > start + 1):
            raise ValueError(
                f"{len(new[0])} tokens follow {start} in a cache for {self.max_sequence_length}: give it the first ones "
                "together, then one at a time, and no more than fit"
            )
        if layer_number not in self._layers:
            self._layers[layer_number] = tuple(x.new_empty(self.max_sequence_length, *x.shape[1:]) for x in new)
        held = self._layers[layer_number]
        for tensor, of_new in zip(held, new, strict=True):
            tensor[start:stop] = of_new
        return tuple(tensor[:stop] for tensor in held)

    def of_layer(self, layer_number: int) -> tuple[Tensor, ...]:
        """Tensors that the layer of that number, from 1, has put in: [k, b, ...] each."""
        return tuple(tensor[: self.num_tokens] for tensor in self._layers[layer_number])

    def halo(self, owner: Hashable) -> CachedHalo:
        """Reaches the tokens before the new ones, of what one owner has shown it; see `megamem.chunk.halo.Halo`."""
        return CachedHalo(self._last, owner)

    def advance(self, num_tokens: int) -> None:
        """All layers have put in their tensors of so many tokens."""
        self.num_tokens += num_tokens

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers on this rank, for one token of every sequence."""
        return sum(x[0].numel() * x.element_size() for held in self._layers.values() for x in held)

    @property
    def last_bytes(self) -> int:
        """Bytes of what is kept of the last tokens alone, whatever their number."""
        return sum(x.nbytes for x in self._last.values())

    def is_static_batching(self) -> bool:
        """Megatron asks: all sequences are of one length."""
        return True

    def is_dynamic_batching(self) -> bool:
        """Megatron asks: sequences come and go."""
        return not self.is_static_batching()

    def is_decode_only(self) -> bool:
        """Megatron asks: only new tokens follow."""
        return self.num_tokens > 0


class CachedHalo:
    """The halo of new tokens: the last ones that were seen before them, which it keeps. A call is a forward pass."""

    def __init__(self, last: dict[Hashable, Tensor], owner: Hashable) -> None:
        """
        Args:
            last: tokens that are kept, by owner.
        """
        self._last, self._owner = last, owner

    def extended(self, x: Tensor, width: int) -> tuple[Tensor, ...]:
        """See `megamem.chunk.halo.Halo.extended`."""
        before = self._last.get(self._owner)
        whole = torch.cat((x.new_zeros(width, *x.shape[1:]) if before is None else before, x))
        self._last[self._owner] = whole[len(whole) - width :].clone()
        return (whole,)


class CachingSelfAttention(SelfAttention):
    """Megatron's self-attention, whose heads are normalised and turned by an op of ours, and keys before a cache gets them.

    Without the op it is Megatron's, but for the cache.
    """

    def __init__(self, *args: Any, rotated_heads: RotatedHeads | None, **megatron: Any) -> None:
        """
        Args:
            rotated_heads: normalises and turns heads. Norms of heads are each a `HeadNorm` then, or the identity, and
                what the blocks are given as `rotary_pos_emb` is of `megamem.attention.rotary.rotary_turns`. None:
                norms are as given, and Megatron turns by angles.
        """
        super().__init__(*args, **megatron)
        self._rotated_heads = rotated_heads

    def _adjust_key_value_for_inference(
        self,
        inference_context: KeyValueCache | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary_pos_emb: tuple[Tensor, Tensor] | None,
        *args: Any,
        **others: Any,
    ) -> Any:
        """Return the query [t, b, n, d], keys and values of all tokens [k, b, g, d], the angles that Megatron has
        yet to turn by, and how scores are masked."""
        if self._rotated_heads is not None:
            assert rotary_pos_emb is not None
            # Megatron doubles what it is given.
            turns, _ = rotary_pos_emb
            query, key = self._rotated_heads(query, key, turns, *self._gains(), self.config.layernorm_epsilon)
            rotary_pos_emb = None
        if inference_context is None:
            return super()._adjust_key_value_for_inference(None, query, key, value, rotary_pos_emb, *args, **others)
        of_queries = None
        if rotary_pos_emb is not None:
            of_queries, of_keys = rotary_pos_emb
            key = apply_rotary_pos_emb(key, of_keys, config=self.config, cp_group=self.pg_collection.cp)
        keys, values = inference_context.extend(self.layer_number, key, value)
        mask = AttnMaskType.no_mask if inference_context.num_tokens else self.attn_mask_type
        return query, keys, values, (of_queries, None), mask, None

    def _gains(self) -> tuple[Tensor | None, Tensor | None]:
        """Gains [d] of the norms of query and key heads, if there are any."""
        norms = self.q_layernorm, self.k_layernorm
        query, key = (norm.weight if isinstance(norm, HeadNorm) else None for norm in norms)
        return query, key
