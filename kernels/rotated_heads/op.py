"""`rotated_heads`: its signature, and the function in PyTorch, whose gradients are autograd's.

Legend: s tokens of a sequence, b sequences, n query heads, g key heads, d columns of a head, of which the first r turn.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.rms_norm.op import torch_rms_norm


class RotatedHeads(Protocol):
    """See `kernels.rotated_heads.naive.rotated_heads`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        turns: Tensor,
        query_gain: Tensor | None,
        key_gain: Tensor | None,
        epsilon: float,
        /,
    ) -> tuple[Tensor, Tensor]: ...


def empty_result(
    query: Tensor,
    key: Tensor,
    turns: Tensor,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The results, not filled yet: without gaps, whatever the strides of the heads."""
    gapless = torch.contiguous_format
    return torch.empty_like(query, memory_format=gapless), torch.empty_like(key, memory_format=gapless)


def torch_rotated_heads(
    query: Tensor,
    key: Tensor,
    turns: Tensor,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The function of `kernels.rotated_heads.naive.rotated_heads`, rounded after the norm and by each operation: Megatron's
    sequence of operations, with its bits."""
    return _turned(query, turns, query_gain, epsilon), _turned(key, turns, key_gain, epsilon)


def _turned(heads: Tensor, turns: Tensor, gain: Tensor | None, epsilon: float) -> Tensor:
    if gain is not None:
        heads = torch_rms_norm(heads, gain, epsilon)
    num_turned = turns.shape[-1]
    turning, rest = heads[..., :num_turned], heads[..., num_turned:]
    cos, sin = (part.to(heads.dtype) for part in turns.split(1, 2))
    first, second = turning.chunk(2, -1)
    out = turning * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((out, rest), -1)
