"""Reference of `doubly_stochastic`: the steps, and autograd's gradients; the oracle of every other implementation."""

from __future__ import annotations

from torch import Tensor


def doubly_stochastic(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    """A matrix per token that is nearly doubly stochastic (Sinkhorn): softmax over columns, then sums of columns and of
    rows are divided out in turn, columns last. Its gradient goes through all steps.

    Args:
        logits: [..., n, n], fp32 or fp64.
        iterations: T, steps by columns, at least 1; between them are steps by rows.
        epsilon: added to the softmax and to every sum, above 0.

    Returns:
        [..., n, n] of the dtype of `logits`.
    """
    mix = logits.softmax(-1) + epsilon
    mix = mix / (mix.sum(-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + epsilon)
        mix = mix / (mix.sum(-2, keepdim=True) + epsilon)
    return mix
