"""Attention core through PyTorch's scaled_dot_product_attention.

Megatron's local core materialises the s x s scores; this one does not, and needs no Transformer Engine.

Legend: s sequence length, b sequences, n query heads and g key/value heads of this tensor-parallel rank, d head
dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


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
        """Causal attention, [s, b, n d], of query [s, b, n, d], key and value [s, b, g, d]. No other mask, no bias."""
        assert attention_mask is None
        assert attention_bias is None
        assert packed_seq_params is None
        return self.attend(query, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention, [s, b, n d], of the query, key and value that `forward` describes."""
        return causal_attention(query, key, value, self.softmax_scale)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention of the last q of k tokens, each to itself and all before it.

    Args:
        query: [q, b, n, d] of tokens k - q to k - 1.
        key: [k, b, g, d] of tokens 0 to k - 1.
        value: [k, b, g, d].
        scale: of the scores; None: 1 / sqrt(d).

    Returns:
        [q, b, n d].
    """
    q, b, n, d = query.shape
    out = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=_mask(q, key.shape[0], query.device),
        is_causal=q == key.shape[0],
        scale=scale,
        enable_gqa=key.shape[2] != n,
    )
    return out.permute(2, 0, 1, 3).reshape(q, b, n * d)


def _mask(q: int, k: int, device: torch.device) -> Tensor | None:
    """The mask of the last q of k tokens; None where `is_causal` serves, which aligns first query and first key."""
    if q == k:
        return None
    if device.type == "cuda":
        # A name for the mask: the fused kernels make none.
        return causal_lower_right(q, k)
    return torch.ones(q, k, dtype=torch.bool, device=device).tril(k - q)
