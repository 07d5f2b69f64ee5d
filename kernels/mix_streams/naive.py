"""Reference of `mix_streams`: the formula, and autograd's gradients; the oracle of every other implementation.

Legend: n streams, D columns. i is the stream that is read, j the one that is written.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mix_streams(streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> Tensor:
    """X'_j = post_j y + sum_i mix_ij X_i of each token, in at least fp32, rounded once to the dtype of X.

    Args:
        streams: X [..., n, D], floating.
        out: y [..., D], likewise.
        post: [..., n], in at least fp32.
        mix: [..., n, n], likewise, the stream read and the stream written; None: the identity.

    Returns:
        [..., n, D] of the dtype of `streams`, differentiable in all four.
    """
    wide = torch.promote_types(streams.dtype, torch.float32)
    mixed = streams.to(wide)
    if mix is not None:
        mixed = (mix.to(wide).unsqueeze(-1) * mixed.unsqueeze(-2)).sum(-3)
    return (mixed + post.to(wide).unsqueeze(-1) * out.to(wide).unsqueeze(-2)).to(streams.dtype)
