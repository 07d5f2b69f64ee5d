"""Slices of tokens, so that temporaries stay in cache, and the rows and vectors that a slice's entries meet."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# 2^18 fp32 elements are 1 MiB, about one core's share of cache.
_SLICE_ELEMENTS = 1 << 18


def token_slices(num_tokens: int, elements_per_token: int) -> Iterator[slice]:
    """Slices of [0, num_tokens) that hold about 2^18 elements each."""
    step = max(1, _SLICE_ELEMENTS // max(1, elements_per_token))
    return (slice(start, start + step) for start in range(0, num_tokens, step))


def slices_on_cpu(x: Tensor, elements_per_token: int) -> Iterator[slice]:
    """Slices of the tokens of x [T, ...], so that temporaries of so many elements stay in a CPU's cache. Elsewhere all tokens
    are one slice: each is launches of its own."""
    if x.device.type == "cpu":
        return token_slices(len(x), elements_per_token)
    return iter([slice(0, len(x))] if len(x) else [])


def by_token(x: Tensor, dims: int) -> Tensor:
    """[T, ...] of [..., ...] whose last `dims` dimensions are of one token."""
    return x.reshape(-1, *x.shape[x.dim() - dims :])


def own_rows(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Ids [T, J] with the first row in place of rows that others hold, and where rows are here, [T, J]."""
    own = (ids >= 0) & (ids < num_rows)
    return ids.where(own, 0), own


def vectors_of_entries(x: Tensor, bins: Tensor, width: int) -> Tensor:
    """x[t, bins[t, j]] with x [T, B W] seen as [T, B, W]: [T, J, W]."""
    x = x.reshape(x.shape[0], -1, width)
    token = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x[token, bins]
