"""Reference of `rotated_heads`: the formula, and autograd's gradients; the oracle of every other implementation.

Legend: s tokens of a sequence, b sequences, n query heads, g key heads, d columns of a head, of which the first r turn.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotated_heads(
    query: Tensor,
    key: Tensor,
    turns: Tensor,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Query and key heads that are normalised, where there are gains, and then turned by their tokens' angles (RoPE).

    With y = x gain / sqrt(mean(x^2) + epsilon) of a head, or y = x without gains, and its token's angle phi_i of pair i:

        out[i]         = y[i] cos(phi_i) - y[i + r / 2] sin(phi_i)
        out[i + r / 2] = y[i + r / 2] cos(phi_i) + y[i] sin(phi_i),   i = 0 .. r / 2 - 1,

    in at least fp32, and rounded once. Columns from r on do not turn.

    Args:
        query: [s, b, n, d], floating.
        key: [s, b, g, d], likewise.
        turns: [s, b or 1, 2, r], fp32: cosines and sines of angles, of which the last r / 2 are the first ones again.
        query_gain: [d], floating; None: heads are not normalised.
        key_gain: [d], likewise, and None where the other is.
        epsilon: added to the mean square.

    Returns:
        Query and key heads in the shapes and dtypes of what came, differentiable in heads and gains.
    """
    return _turned(query, turns, query_gain, epsilon), _turned(key, turns, key_gain, epsilon)


def _turned(heads: Tensor, turns: Tensor, gain: Tensor | None, epsilon: float) -> Tensor:
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    if gain is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * gain.to(wide.dtype)
    half = turns.shape[-1] // 2
    cos, sin = (part.unsqueeze(2) for part in turns[..., :half].unbind(2))
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1).to(heads.dtype)
