"""Attention of a block of queries to a block of keys, with the normaliser of its softmax.

A softmax over many keys is put together from softmaxes over parts of them: with l = log sum_j exp(s_j) of each part,
outputs are averaged with weights exp(l) (`blockwise.py`). PyTorch's public attention keeps l to itself, and so this
file calls the operations below it: its fused CPU kernel, FlashAttention on GPUs for 16-bit tensors, and products of
matrices, a bounded number of queries at a time, for everything else.

A tile is a rectangle of which nothing is masked, or a square of which the upper triangle is: the cases in which no
kernel needs a mask in memory, and on whose meaning all of them agree.

Legend: b sequences, q queries, k keys, n query heads and g key/value heads, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCORES_AT_A_TIME = 1 << 22
_aten = torch.ops.aten


def tile_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale Q K^T) V and the normalisers, without gradients.

    Args:
        query: [b, n, q, d].
        key: [b, g, k, d], where g divides n.
        value: [b, g, k, d].
        causal: query i attends to keys 0 to i, and q = k; else to all.
        scale: factor of the scores.

    Returns:
        [b, n, q, d] in the dtype of the query, and log sum_j exp(s_j) [b, n, q] in at least fp32.
    """
    if query.device.type == "cpu":
        out, normaliser = _aten._scaled_dot_product_flash_attention_for_cpu(
            *_one_key_head(query, key, value), 0.0, causal, scale=scale
        )
        return out.view_as(query), normaliser.reshape(query.shape[:3])
    if _has_flash(query):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, normaliser, *_ = _aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2), normaliser
    return matrix_attention(query, key, value, causal=causal, scale=scale)


def tile_gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normaliser: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's part of the gradients of query, key and value.

    Args:
        grad_out: gradient of the output over all keys [b, n, q, d].
        query: queries; `key`, `value`, `causal` and `scale` go with them, as in `tile_attention`.
        out: the output over all keys, of which the tile has some [b, n, q, d].
        normaliser: normalisers over all keys [b, n, q].
    """
    if query.device.type == "cpu":
        one_head = _one_key_head(query, key, value)
        same = one_head[0].shape
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out.reshape(same), *one_head, out.reshape(same), normaliser.reshape(same[:3]), 0.0, causal, scale=scale
        )
        return grads[0].reshape_as(query), *(_sum_over_queries(x, key) for x in grads[1:])
    if _has_flash(query):
        g, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        # For dropout, of which there is none: room that PyTorch's own backward pass does not fill either.
        no_seed, unused = (torch.empty(2, dtype=torch.uint64, device=q.device) for _ in range(2))
        grads = _aten._flash_attention_backward(
            *(g, q, k, v, o, normaliser.contiguous()),
            *(None, None, q.shape[1], k.shape[1], 0.0, causal, no_seed, unused),
            scale=scale,
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv
    return matrix_gradients(grad_out, query, key, value, out, normaliser, causal=causal, scale=scale)


def matrix_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`tile_attention` by products of matrices, a bounded number of scores at a time."""
    outs, normalisers = [], []
    for rows in _rows_at_a_time(query, key):
        scores, values = _scores(query, key, rows, causal, scale), _widened(value, query)
        normaliser = scores.logsumexp(-1)
        outs.append(((scores - normaliser.unsqueeze(-1)).exp() @ values).to(query.dtype))
        normalisers.append(normaliser)
    return torch.cat(outs, 2), torch.cat(normalisers, 2)


def matrix_gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normaliser: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`tile_gradients` by products of matrices, a bounded number of scores at a time."""
    keys, values = _widened(key, query), _widened(value, query)
    grad_query = torch.empty_like(query)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    for rows in _rows_at_a_time(query, key):
        # [b, n, rows, d] each, and the share of each key in each query's output.
        queries, grads, outs = (x[:, :, rows].to(keys.dtype) for x in (query, grad_out, out))
        shares = (_scores(query, key, rows, causal, scale) - normaliser[:, :, rows].unsqueeze(-1)).exp()
        through_shares = grads @ values.transpose(-1, -2) - (grads * outs).sum(-1, keepdim=True)
        grad_scores = shares * through_shares * scale
        grad_query[:, :, rows] = (grad_scores @ keys).to(query.dtype)
        grad_keys += grad_scores.transpose(-1, -2) @ queries
        grad_values += shares.transpose(-1, -2) @ grads
    shape = (key.shape[0], key.shape[1], -1, *key.shape[2:])
    grad_key, grad_value = (x.view(shape).sum(2).to(key.dtype) for x in (grad_keys, grad_values))
    return grad_query, grad_key, grad_value


def _has_flash(query: Tensor) -> bool:
    return query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _one_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For a kernel without grouped queries: [b g, n/g, ., d] each, where the heads of a group share one key in memory."""
    b, g = key.shape[:2]
    queries_per_key = query.shape[1] // g
    keys, values = (x.flatten(0, 1).unsqueeze(1).expand(-1, queries_per_key, -1, -1) for x in (key, value))
    return query.reshape(b * g, queries_per_key, *query.shape[2:]), keys, values


def _sum_over_queries(grad: Tensor, key: Tensor) -> Tensor:
    """The gradient of shared keys [b, g, k, d], of those that each query head had for itself [b g, n/g, k, d]."""
    if grad.shape[1] == 1:
        return grad.reshape_as(key)
    return grad.sum(1).reshape_as(key)


def _rows_at_a_time(query: Tensor, key: Tensor) -> list[slice]:
    b, n, q, _ = query.shape
    rows = max(1, _SCORES_AT_A_TIME // (b * n * key.shape[2]))
    return [slice(start, min(start + rows, q)) for start in range(0, q, rows)]


def _scores(query: Tensor, key: Tensor, rows: slice, causal: bool, scale: float) -> Tensor:
    """[b, n, rows, k] in at least fp32."""
    keys = _widened(key, query)
    scores = query[:, :, rows].to(keys.dtype) @ keys.transpose(-1, -2) * scale
    if not causal:
        return scores
    after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(rows.start + 1)
    return scores.masked_fill(after, -torch.inf)


def _widened(x: Tensor, query: Tensor) -> Tensor:
    """[b, n, k, d] in at least fp32, of [b, g, k, d]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.repeat_interleave(query.shape[1] // x.shape[1], 1)
