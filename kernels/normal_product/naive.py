"""Reference of `normal_product`: the formula, and autograd's gradients; the oracle of every other implementation."""

from __future__ import annotations

from torch import Tensor


def normal_product(x: Tensor, weight: Tensor, epsilon: float, centred: bool = False) -> Tensor:
    """W ((x - m) / sqrt(mean((x - m)^2) + epsilon)) of each token, in the dtype of W.

    Args:
        x: [..., K], floating.
        weight: W [M, K], in at least fp32, and in no fewer digits than x.
        epsilon: added to the mean square, above 0.
        centred: m is the mean of x, as in layer normalisation; else 0.

    Returns:
        [..., M], differentiable in `x` and `weight`.
    """
    wide = x.to(weight.dtype)
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    normal = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return normal @ weight.t()
