"""Attention in tiles: outputs over some of the keys at a time, put together by the normalisers of their softmaxes.

With l_p = log sum_j exp(s_j) over the keys of part p and o_p the output over them alone, the output over all of them is
sum_p exp(l_p - l) o_p, where l = log sum_p exp(l_p). In backward a tile needs nothing but l and the final output, so
what is kept is linear in the tokens, whatever the number of tiles. Sums are taken in at least fp32, in the order of the
tiles.

Legend: q queries and k keys of a rank, b sequences, n query heads and g key/value heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megamem.attention.documents import ScoreTile
from megamem.attention.tile import tile_attention, tile_gradients


def tiled_attention(query: Tensor, key: Tensor, value: Tensor, tiles: Sequence[ScoreTile], scale: float) -> Tensor:
    """Attention over the scores that `tiles` name, which give every query at least one key.

    Args:
        query: [q, b, n, d].
        key: [k, b, g, d].
        value: [k, b, g, d].
        tiles: tiles of which no two have a score in common.
        scale: factor of the scores.

    Returns:
        [q, b, n, d].
    """
    out: Tensor = _TiledAttention.apply(query, key, value, tiles, scale)
    return out


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: Sequence[ScoreTile], scale: float
    ) -> Tensor:
        partial = PartialAttention(query, scale)
        partial.add(key, value, tiles)
        out = partial.out
        ctx.save_for_backward(query, key, value, out, partial.normaliser)
        ctx.tiles, ctx.scale = tiles, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, normaliser = ctx.saved_tensors
        gradients = PartialGradients(query, out, normaliser, grads[0], ctx.scale)
        grad_keys = gradients.add(key, value, ctx.tiles)
        return (gradients.query, *(x.to(key.dtype) for x in grad_keys), None, None)


class PartialAttention:
    """The output over the keys that were added, of queries [q, b, n, d].

    Attributes:
        normaliser: log of the sum of exp(score) of every query over those keys [q, b, n], in at least fp32.
    """

    def __init__(self, query: Tensor, scale: float) -> None:
        self._query, self._scale = query, scale
        self._out = torch.zeros_like(query, dtype=_accumulated(query))
        self.normaliser = query.new_full(query.shape[:3], -torch.inf, dtype=self._out.dtype)

    @property
    def out(self) -> Tensor:
        """[q, b, n, d] in the dtype of the queries."""
        return self._out.to(self._query.dtype)

    def add(self, key: Tensor, value: Tensor, tiles: Iterable[ScoreTile]) -> None:
        """Let the queries attend to some of the keys and values [k, b, g, d]."""
        for tile in tiles:
            of_queries, of_keys = (tile.queries, tile.sequences), (tile.keys, tile.sequences)
            operands = (_heads_first(x) for x in (self._query[of_queries], key[of_keys], value[of_keys]))
            tile_out, tile_normaliser = tile_attention(*operands, causal=tile.causal, scale=self._scale)
            tile_normaliser = tile_normaliser.permute(2, 0, 1)
            out, normaliser = self._out[of_queries], self.normaliser[of_queries]
            # Both weights add up to one: exp(l_p - l) of the tile is the logistic function of how far its normaliser
            # exceeds that of the keys before, of which there may be none.
            share = torch.sigmoid(tile_normaliser - normaliser).unsqueeze(-1)
            out.lerp_(_tokens_first(tile_out).to(out.dtype), share)
            torch.logaddexp(normaliser, tile_normaliser, out=normaliser)


class PartialGradients:
    """The gradients that come from the keys that were added, given those of the output over all keys [q, b, n, d].

    `normaliser` [q, b, n] and `out` [q, b, n, d] are over all keys too.
    """

    def __init__(self, query: Tensor, out: Tensor, normaliser: Tensor, grad_out: Tensor, scale: float) -> None:
        self._query, self._out, self._normaliser = query, out, normaliser
        self._grad_out, self._scale = grad_out, scale
        self._grad_query = torch.zeros_like(query, dtype=_accumulated(query))

    @property
    def query(self) -> Tensor:
        """Gradient of the queries [q, b, n, d], in their dtype."""
        return self._grad_query.to(self._query.dtype)

    def add(self, key: Tensor, value: Tensor, tiles: Iterable[ScoreTile]) -> Tensor:
        """Gradients of some keys and values [k, b, g, d], stacked [2, k, b, g, d], in at least fp32."""
        grads = torch.zeros(2, *key.shape, dtype=_accumulated(key), device=key.device)
        for tile in tiles:
            of_queries, of_keys = (tile.queries, tile.sequences), (tile.keys, tile.sequences)
            of_tile = tile_gradients(
                _heads_first(self._grad_out[of_queries]),
                _heads_first(self._query[of_queries]),
                _heads_first(key[of_keys]),
                _heads_first(value[of_keys]),
                _heads_first(self._out[of_queries]),
                self._normaliser[of_queries].permute(1, 2, 0),
                causal=tile.causal,
                scale=self._scale,
            )
            sums = self._grad_query[of_queries], grads[0][of_keys], grads[1][of_keys]
            for total, part in zip(sums, of_tile, strict=True):
                total += _tokens_first(part)
        return grads


def _accumulated(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _heads_first(x: Tensor) -> Tensor:
    """[b, n, s, d] of [s, b, n, d]."""
    return x.permute(1, 2, 0, 3)


def _tokens_first(x: Tensor) -> Tensor:
    """[s, b, n, d] of [b, n, s, d]."""
    return x.permute(2, 0, 1, 3)
