"""`doubly_stochastic`: its signature, and the function in PyTorch with its gradient.

Legend: T iterations, N matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common.ops import needs_gradient
from kernels.common.slices import by_token, slices_on_cpu


class DoublyStochastic(Protocol):
    """See `kernels.doubly_stochastic.naive.doubly_stochastic`."""

    def __call__(self, logits: Tensor, iterations: int, epsilon: float, /) -> Tensor: ...


def empty_result(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    """The result, not filled yet: without gaps, whatever the strides of `logits`."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def num_steps(iterations: int) -> int:
    """Sums that are divided out, one after the other: columns first and last."""
    return 2 * iterations - 1


def torch_doubly_stochastic(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    """The function of `kernels.doubly_stochastic.naive.doubly_stochastic`.

    Backward keeps the logits alone, and goes through the steps again. Left to PyTorch's autograd, the formula keeps 2 T matrices
    and as many sums.
    """
    if not needs_gradient(logits):
        return _normalised(logits, iterations, epsilon)
    out: Tensor = _DoublyStochastic.apply(logits, iterations, epsilon)
    return out


class _DoublyStochastic(torch.autograd.Function):
    """With y = x / s, s = sum x + epsilon: dx = (dy - sum(dy y)) / s, and backward has x = y s of what comes after it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, epsilon: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.numbers = iterations, epsilon
        return _normalised(logits, iterations, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        iterations, epsilon = ctx.numbers
        gradient = empty_result(logits, iterations, epsilon)
        n = logits.shape[-1]
        for part, of_mix, out in _parts(n * (n + 2 * num_steps(iterations)), logits, grads[0], gradient):
            mix = part.softmax(1)
            shares, sums = mix.clone(), []
            mix += epsilon
            for step in range(num_steps(iterations)):
                sums.append(mix.sum(step % 2, keepdim=True).add_(epsilon))
                mix /= sums[-1]
            for step in reversed(range(num_steps(iterations))):
                of_mix = (of_mix - (of_mix * mix).sum(step % 2, keepdim=True)).div_(sums[step])
                mix *= sums[step]
            out.copy_((of_mix - (of_mix * shares).sum(1, keepdim=True)).mul_(shares))
        return gradient, None, None


def _normalised(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    result = empty_result(logits, iterations, epsilon)
    for part, out in _parts(logits.shape[-1] ** 2, logits, result):
        mix = part.softmax(1).add_(epsilon)
        for step in range(num_steps(iterations)):
            mix /= mix.sum(step % 2, keepdim=True).add_(epsilon)
        out.copy_(mix)
    return result


def _parts(elements_per_matrix: int, *matrices: Tensor) -> Iterator[list[Tensor]]:
    """Views [n, n, N] of slices of matrices: a processor's vectors are of many matrices, which have few numbers.

    The first ones are copies, in this order in memory; on a CPU they stay in its cache.
    """
    flat = [by_token(each, 2) for each in matrices]
    for part in slices_on_cpu(flat[0], elements_per_matrix):
        turned = [each[part].permute(1, 2, 0) for each in flat]
        yield [*(each.contiguous() for each in turned[:-1]), turned[-1]]
