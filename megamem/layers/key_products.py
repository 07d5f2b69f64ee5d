"""Products of queries with all keys, whose number a GPU's matrix units like.

Legend: B products, T tokens, d key width, N keys, P keys with those that fill them up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ALIGNMENT_BYTES = 16
"""Multiple of which cuBLAS's kernels for Hopper and Blackwell want every row to be. Others take three to six times as
long: with 804 keys in bf16, 22 ms of a step of the 227M/1.2B model on an H100, whose operations need 4. Rows that begin
at multiples are not enough: the sizes of the product must be multiples, too."""


def key_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Products queries keys, [B, T, N], of queries [B, T, d] and keys [B, d, N] of any strides.

    On a GPU a row of the result has room for P >= N numbers, of which the last are zero. A gradient that lies in memory
    as the result does, alone in its storage and with zeros in the same places, is multiplied where it is.
    """
    if not queries.is_cuda:
        return torch.bmm(queries, keys)
    return aligned_products(queries, keys, _ALIGNMENT_BYTES // queries.element_size())


def aligned_products(queries: Tensor, keys: Tensor, alignment: int) -> Tensor:
    """Do as `key_products` on a GPU, with P the next multiple of `alignment`."""
    out: Tensor = _AlignedProducts.apply(queries, keys, alignment)
    return out


class _AlignedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, alignment: int) -> Tensor:
        filled = _filled(keys, alignment)
        ctx.save_for_backward(queries, filled)
        ctx.alignment, ctx.num_keys = alignment, keys.shape[2]
        return torch.bmm(queries, filled)[..., : keys.shape[2]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        queries, keys = ctx.saved_tensors
        gradient = _filled(grads[0], ctx.alignment)
        of_queries = torch.bmm(gradient, keys.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        of_keys = torch.bmm(queries.transpose(1, 2), gradient) if ctx.needs_input_grad[1] else None
        return of_queries, None if of_keys is None else of_keys[..., : ctx.num_keys], None


def _filled(tensor: Tensor, alignment: int) -> Tensor:
    """The tensor [B, T, N], with zeros up to [B, T, P]: itself, what it is a part of, or a copy."""
    *sizes, width = tensor.shape
    filled = -(-width // alignment) * alignment
    if filled == width:
        return tensor
    # The whole of a storage of this size has gaps that belong to nobody else: what made it has zeroed them.
    strides = (sizes[1] * filled, filled, 1)
    num_bytes = sizes[0] * strides[0] * tensor.element_size()
    if tensor.stride() == strides and tensor.untyped_storage().nbytes() == num_bytes:
        return tensor.as_strided((*sizes, filled), strides)
    copy = tensor.new_empty(*sizes, filled)
    copy[..., :width].copy_(tensor)
    copy[..., width:].zero_()
    return copy
