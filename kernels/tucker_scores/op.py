"""`tucker_scores`: its signature, and the function in PyTorch and in C++, both with their gradients.

Legend: T tokens, H heads, N keys per side, R Tucker rank, C cores, K kept entries per token and head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common import cpp
from kernels.common.ops import custom_op, needs_gradient
from kernels.kept_scores import kept_of_both

# As in cpu.cpp: lists that share a sum of the cores' gradients.
_LISTS_PER_PART = 64


class TuckerScores(Protocol):
    """See `kernels.tucker_scores.naive.tucker_scores`."""

    def __call__(self, scores: Tensor, cores: Tensor, entries: Tensor, /) -> Tensor: ...


def empty_result(scores: Tensor, cores: Tensor, entries: Tensor) -> Tensor:
    """The result, not filled yet; also the op's fake for `torch.compile`."""
    return cores.new_empty(*entries.shape[1:], cores.shape[0])


def torch_tucker_scores(scores: Tensor, cores: Tensor, entries: Tensor) -> Tensor:
    """The function of `kernels.tucker_scores.naive.tucker_scores`, with gradients that are the same in every run."""
    rows, columns = kept_of_both(scores, entries).unbind(0)
    return torch.einsum("thkr,chrs,thks->thkc", rows, cores, columns)


@custom_op("cpu_tucker_scores", empty_result)
def _scores(scores: Tensor, cores: Tensor, entries: Tensor) -> Tensor:
    lists, cores, entries = _operands(scores, cores, entries)
    out = empty_result(scores, cores, entries)
    sizes = _sizes(lists, cores, entries)
    cpp.call("tucker_scores", "tucker_scores", cpp.type_of_scores(lists), lists, cores, entries, out, *sizes)
    return out


def _empty_gradients(scores: Tensor, cores: Tensor, entries: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    lists, cores, _ = _operands(scores, cores, entries)
    return torch.empty_like(lists).transpose(3, 4), torch.empty_like(cores)


@custom_op("cpu_tucker_scores_gradients", _empty_gradients)
def _gradients(scores: Tensor, cores: Tensor, entries: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    lists, cores, entries = _operands(scores, cores, entries)
    of_scores = torch.empty_like(lists)
    num_parts = -(-lists.shape[1] * lists.shape[2] // _LISTS_PER_PART)
    of_cores = cores.new_empty(num_parts, *cores.shape)
    tensors = (lists, cores, entries, gradient.contiguous(), of_scores, of_cores)
    sizes = _sizes(lists, cores, entries)
    cpp.call("tucker_scores", "tucker_scores_gradients", cpp.type_of_scores(lists), *tensors, *sizes)
    return of_scores.transpose(3, 4), of_cores.sum(0)


def _operands(scores: Tensor, cores: Tensor, entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scores as lists, [2, T, H, R, N], in memory without gaps; the others contiguous."""
    lists, cores = cpp.lists(scores.transpose(3, 4), cores.contiguous())
    if torch.empty_like(lists).stride() != lists.stride():
        lists = lists.contiguous()
    return lists, cores, entries.contiguous()


def _sizes(lists: Tensor, cores: Tensor, entries: Tensor) -> tuple[int, ...]:
    _, num_tokens, num_heads, rank, num_keys = lists.shape
    sizes = (num_tokens * num_heads, num_heads, num_keys, rank, cores.shape[0], entries.shape[3])
    return *lists.stride()[:4], *sizes


class _TuckerScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, cores: Tensor, entries: Tensor) -> Tensor:
        ctx.save_for_backward(scores, cores, entries)
        return _scores(scores, cores, entries)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        scores, cores, entries = ctx.saved_tensors
        return *_gradients(scores, cores, entries, grads[0]), None


def cpu_tucker_scores(scores: Tensor, cores: Tensor, entries: Tensor) -> Tensor:
    """`tucker_scores` in C++, with gradients: `torch.compile` takes it as it is."""
    if not needs_gradient(scores, cores):
        return _scores(scores, cores, entries)
    out: Tensor = _TuckerScores.apply(scores, cores, entries)
    return out
