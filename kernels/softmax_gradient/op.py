"""`softmax_gradient`: its signature, and the function in PyTorch. It has no gradient.

Legend: n tokens, V ids of this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.softmax_sums.op import at_least_fp32, places_to_read


class SoftmaxGradient(Protocol):
    """See `kernels.softmax_gradient.naive.softmax_gradient`. Logits are contiguous, and gone afterwards."""

    def __call__(self, logits: Tensor, places: Tensor, top: Tensor, total: Tensor, scale: Tensor, /) -> Tensor: ...


def empty_result(logits: Tensor, places: Tensor, top: Tensor, total: Tensor, scale: Tensor) -> Tensor:
    """The result, which lies where the logits are."""
    return logits


def torch_softmax_gradient(logits: Tensor, places: Tensor, top: Tensor, total: Tensor, scale: Tensor) -> Tensor:
    """The function of `kernels.softmax_gradient.naive.softmax_gradient`, in the memory of the logits."""
    place, is_elsewhere = places_to_read(places, logits.shape[1])
    wide = logits.to(at_least_fp32(logits))
    wide -= top.unsqueeze(1)
    wide.exp_().div_(total.unsqueeze(1))
    wide.scatter_add_(1, place, is_elsewhere.to(wide.dtype) - 1.0)
    wide *= scale.unsqueeze(1)
    return logits if wide is logits else logits.copy_(wide)
