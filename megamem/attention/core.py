"""Attention core through PyTorch's scaled_dot_product_attention.

Megatron's local core materialises the s x s scores; this one does not, and needs no Transformer Engine.

Legend: s sequence length and k tokens of a cache, b sequences, n query heads and g key/value heads of this
tensor-parallel rank, d head dimension, D documents of the microbatch.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megamem.attention.blockwise import tiled_attention
from megamem.attention.documents import Documents, Slice


class SdpaCoreAttention(MegatronModule):
    """Causal attention for the `core_attention` slot of Megatron's SelfAttention, over whole sequences."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Causal attention, [s, b, n d], of query [s, b, n, d], key and value [s, b, g, d].

        A query [1, b, n, d] with `no_mask` is of the last token, and attends to all of a cache's keys and values
        [k, b, g, d]. `attention_mask` is the documents' bounds (`documents.py`), [D + 1] in host memory, across
        which nothing attends; None: every sequence is one document. There is no other mask, and no bias.
        """
        assert attention_bias is None
        assert packed_seq_params is None
        if attn_mask_type is AttnMaskType.no_mask:
            assert attention_mask is None
            return last_token_attention(query, key, value, self.scale_of(query))
        return self.attend(query, key, value, attention_mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None) -> Tensor:
        """Causal attention, [s, b, n d], of the query, key, value and bounds that `forward` describes."""
        return causal_attention(query, key, value, self.scale_of(query), bounds)

    def scale_of(self, query: Tensor) -> float:
        """The factor of the scores of queries [..., d]."""
        return query.shape[-1] ** -0.5 if self.softmax_scale is None else float(self.softmax_scale)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, bounds: Tensor | None) -> Tensor:
    """Attention of each token to itself and all before it in its document.

    Args:
        query: [s, b, n, d].
        key: [s, b, g, d].
        value: [s, b, g, d].
        scale: factor of the scores.
        bounds: bounds of the documents, [D + 1] int64 in host memory; None: every sequence is one.

    Returns:
        [s, b, n d].
    """
    if bounds is not None:
        whole = Slice(0, query.shape[0])
        tiles = tuple(Documents.of(bounds, query.shape[0]).tiles(whole, whole))
        return tiled_attention(query, key, value, tiles, scale).flatten(2)
    out = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        is_causal=True,
        scale=scale,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def last_token_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of one token to all of a cache, itself included.

    Args:
        query: [1, b, n, d].
        key: [k, b, g, d].
        value: [k, b, g, v], which may be narrower or wider than keys.
        scale: factor of the scores.

    Returns:
        [1, b, n v].
    """
    # The heads that share a key are the queries of one head: no key is copied for them.
    out = F.scaled_dot_product_attention(
        query[0].unflatten(1, (key.shape[2], -1)), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), scale=scale
    )
    return out.flatten(1).unsqueeze(0)
