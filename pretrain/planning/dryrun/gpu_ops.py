"""Fused ops that PyTorch has for a GPU, and takes apart into many others for tensors of "meta".

Each keeps for backward, returns and allocates what the GPU's does, as one op each way: attention as FlashAttention, and
the norm as PyTorch's fused kernel.

Legend: b sequences, n query and g key heads, q queries, k keys, d width of a head and v of its values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_attention = F.scaled_dot_product_attention
_rms_norm = F.rms_norm


@torch.library.custom_op("megamem_dryrun::attention", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("has no data")


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    b, n, q, d = query.shape
    same = value.shape[-1] == d
    # FlashAttention's is in the memory order of the query; values of another width take another kernel.
    out = torch.empty_like(query) if same else query.new_empty(b, q, n, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty((b, n, q), dtype=torch.float32)


@torch.library.custom_op("megamem_dryrun::attention_backward", mutates_args=())
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise AssertionError("has no data")


@_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _attention_gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
    return _backward(grad, *ctx.saved_tensors)


_forward.register_autograd(_attention_gradients, setup_context=_keep_attention)


@torch.library.custom_op("megamem_dryrun::rms_norm", mutates_args=())
def _norm(x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("has no data")


@_norm.register_fake
def _(x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    # The result is contiguous, `x` is kept as it is; and a number per row.
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("megamem_dryrun::rms_norm_backward", mutates_args=())
def _norm_backward(grad: Tensor, x: Tensor, gain: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("has no data")


@_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, gain: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(gain)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _norm_gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
    return _norm_backward(grad, *ctx.saved_tensors)


_norm.register_autograd(_norm_gradients, setup_context=_keep_norm)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """PyTorch's `scaled_dot_product_attention`, of queries [b, n, q, d], keys [b, g, k, d], values [b, g, k, v]."""
    if query.device.type == "cpu":
        return _attention(query, key, value, attn_mask, dropout_p, **options)
    assert attn_mask is None
    assert dropout_p == 0.0
    out: Tensor = _forward(query, key, value)[0]
    return out


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """PyTorch's `rms_norm`, over the last dimension."""
    if x.device.type == "cpu":
        return _rms_norm(x, shape, weight, eps)
    assert weight is not None
    assert len(shape) == 1
    out: Tensor = _norm(x, weight)[0]
    return out


REDIRECTIONS: dict[str, Any] = {
    "torch.nn.functional.scaled_dot_product_attention": attention,
    "torch.nn.functional.rms_norm": rms_norm,
}
