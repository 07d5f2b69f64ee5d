"""Reference of `weigh_streams`: the formula, and autograd's gradients; the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def weigh_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """u = sum_i w_i X_i of each token, in at least fp32, rounded once to the dtype of X.

    Args:
        streams: X [..., n, D], floating.
        weights: w [..., n], in at least fp32.

    Returns:
        [..., D] of the dtype of `streams`, differentiable in both.
    """
    wide = torch.promote_types(streams.dtype, torch.float32)
    return (weights.to(wide).unsqueeze(-1) * streams.to(wide)).sum(-2).to(streams.dtype)
