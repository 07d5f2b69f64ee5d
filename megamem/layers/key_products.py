"""Products of queries with all keys, whose rows begin where a GPU's matrix units can load them.

Legend: B products, T tokens, d key width, N keys, P keys with what fills them up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ALIGNMENT_BYTES = 16
"""Distance of rows of matrices, which cuBLAS's kernels for Hopper and Blackwell want to be a multiple of this. Others
take three to six times as long: of 804 keys in bf16, 22 ms of a step of the 227M/1.2B model on an H100, where operations
need 4."""


def key_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Products queries keys, [B, T, N], of queries [B, T, d] and keys [B, d, N] of any strides.

    On a GPU a row of the result, and of the gradients, has room for P >= N numbers.
    """
    if not queries.is_cuda:
        return torch.bmm(queries, keys)
    return aligned_products(queries, keys, _ALIGNMENT_BYTES // queries.element_size())


def aligned_products(queries: Tensor, keys: Tensor, alignment: int) -> Tensor:
    """Do as `key_products` on a GPU, with P the next multiple of `alignment` elements."""
    out: Tensor = _AlignedProducts.apply(queries, keys, alignment)
    return out


class _AlignedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, alignment: int) -> Tensor:
        aligned = _empty(keys, alignment).copy_(keys)
        ctx.save_for_backward(queries, aligned)
        ctx.alignment = alignment
        out = _empty(queries, alignment, keys.shape[2])
        torch.bmm(queries, aligned, out=out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (queries, keys) = grads, ctx.saved_tensors
        if gradient.stride(2) != 1 or gradient.stride(1) % ctx.alignment:
            gradient = _empty(gradient, ctx.alignment).copy_(gradient)
        of_queries = of_keys = None
        if ctx.needs_input_grad[0]:
            of_queries = torch.bmm(gradient, keys.transpose(1, 2))
        if ctx.needs_input_grad[1]:
            of_keys = _empty(keys, ctx.alignment)
            torch.bmm(queries.transpose(1, 2), gradient, out=of_keys)
        return of_queries, of_keys, None


def _empty(like: Tensor, alignment: int, width: int | None = None) -> Tensor:
    """An unset tensor of the shape of `like`, or with a last dimension of `width`, whose rows are aligned."""
    width = like.shape[2] if width is None else width
    return like.new_empty(*like.shape[:2], -(-width // alignment) * alignment)[..., :width]
