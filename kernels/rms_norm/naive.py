"""Reference of `rms_norm`: the formula, and autograd's gradients; the oracle of every other implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """x gain / sqrt(mean(x^2) + epsilon) over the last dimension, in at least fp32, rounded once to the dtype of `x`.

    Args:
        x: [..., D], floating.
        gain: [D], floating.
        epsilon: added to the mean square, above 0.

    Returns:
        [..., D] of the dtype of `x`, differentiable in `x` and `gain`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return (normal * gain.to(wide.dtype)).to(x.dtype)
