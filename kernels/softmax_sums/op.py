"""`softmax_sums`: its signature, and the function in PyTorch. Its gradient is an op of its own, `softmax_gradient`.

Legend: n tokens, V ids of this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class SoftmaxSums(Protocol):
    """See `kernels.softmax_sums.naive.softmax_sums`. Logits are contiguous, and gone afterwards. Without autograd."""

    def __call__(self, logits: Tensor, places: Tensor, /) -> tuple[Tensor, Tensor, Tensor]: ...


def empty_result(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result, not filled yet; also the op's fake for `torch.compile`."""
    num_tokens, dtype = logits.shape[0], at_least_fp32(logits)
    top, total, of_target = (logits.new_empty(num_tokens, dtype=dtype) for _ in range(3))
    return top, total, of_target


def torch_softmax_sums(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The function of `kernels.softmax_sums.naive.softmax_sums`, in the memory of fp32 logits, or in one copy of others."""
    # Whoever takes gradients through this would find overwritten logits.
    assert not logits.requires_grad
    place, is_elsewhere = places_to_read(places, logits.shape[1])
    wide = logits.to(at_least_fp32(logits))
    of_target = wide.gather(1, place).masked_fill_(is_elsewhere, 0.0).squeeze(1)
    top = wide.amax(1)
    wide -= top.unsqueeze(1)
    total = wide.exp_().sum(1)
    return top, total.masked_fill_(top == -torch.inf, 0.0), of_target


def at_least_fp32(logits: Tensor) -> torch.dtype:
    """The dtype that sums are in."""
    return torch.promote_types(logits.dtype, torch.float32)


def places_to_read(places: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Places with 0 for those outside of [0, num_ids), and a mask of these: both [n, 1]."""
    place = places.unsqueeze(1)
    is_elsewhere = (place < 0) | (place >= num_ids)
    return place.masked_fill(is_elsewhere, 0), is_elsewhere
