"""Attention of one tile and its normaliser, by every implementation that this machine has, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import megamem.attention.tile
from megamem.attention.tile import matrix_attention, matrix_gradients, tile_attention, tile_gradients

SCALE = 0.4
# A unit in the last place is 2^-8 in bf16 and 2^-23 in fp32; sums of ten numbers of size 1 are rounded a few times.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 4e-2}
IMPLEMENTATIONS = {"kernel": (tile_attention, tile_gradients), "matrices": (matrix_attention, matrix_gradients)}


def defined(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and normaliser in fp64, a query at a time."""
    outs, normalisers = [], []
    for head in range(query.shape[1]):
        of_group = head * key.shape[1] // query.shape[1]
        for i in range(query.shape[2]):
            stop = i + 1 if causal else key.shape[2]
            scores = SCALE * torch.einsum("bd,bkd->bk", query[:, head, i], key[:, of_group, :stop])
            outs.append(torch.einsum("bk,bkd->bd", scores.softmax(-1), value[:, of_group, :stop]))
            normalisers.append(scores.exp().sum(-1).log())
    shape = (query.shape[1], query.shape[2])
    return (
        torch.stack(outs, 1).unflatten(1, shape),
        torch.stack(normalisers, 1).unflatten(1, shape),
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("shape", [(7, 7, True), (1, 1, True), (5, 9, False), (9, 4, False)], ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_tile_is_what_the_definition_says(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int, bool], key_heads: int, dtype: torch.dtype
) -> None:
    attend: Callable[..., Any]
    differentiate: Callable[..., Any]
    attend, differentiate = IMPLEMENTATIONS[name]
    # Two queries at a time, so that the last has fewer.
    monkeypatch.setattr(megamem.attention.tile, "_SCORES_AT_A_TIME", 2 * 3 * 4 * shape[1])
    generator = torch.Generator().manual_seed(1)
    q, k, causal = shape

    def random(*shape: int) -> Tensor:
        # Tokens first in memory, as in the model.
        return torch.randn(shape[2], shape[0], shape[1], shape[3], generator=generator).to(dtype).permute(1, 2, 0, 3)

    parts = [random(3, 4, q, 6), random(3, key_heads, k, 6), random(3, key_heads, k, 6)]
    upstream = random(3, 4, q, 6)
    wide = [part.double().requires_grad_() for part in parts]
    out, normaliser = defined(*wide, causal)
    expected = torch.autograd.grad(out, wide, upstream.double())
    actual, actual_normaliser = attend(*parts, causal=causal, scale=SCALE)
    assert actual_normaliser.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.allclose(actual_normaliser.double(), normaliser, rtol=0, atol=min(TOLERANCES[dtype], 1e-3))
    gradients = differentiate(upstream, *parts, actual, actual_normaliser, causal=causal, scale=SCALE)
    for ours, plain in zip((actual, *gradients), (out, *expected), strict=True):
        assert (ours.dtype, ours.shape) == (dtype, plain.shape)
        assert torch.allclose(ours.double(), plain, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_tile_s_gradients_are_its_part_of_those_over_all_keys(dtype: torch.dtype) -> None:
    """Two tiles given the output and the normaliser over both add up to one."""
    generator = torch.Generator().manual_seed(2)
    query, key, value, upstream = (torch.randn(1, 2, 6, 5, generator=generator).to(dtype) for _ in range(4))
    out, normaliser = tile_attention(query, key, value, causal=False, scale=SCALE)
    whole = tile_gradients(upstream, query, key, value, out, normaliser, causal=False, scale=SCALE)
    first, second = (
        tile_gradients(upstream, query, key[:, :, part], value[:, :, part], out, normaliser, causal=False, scale=SCALE)
        for part in (slice(0, 2), slice(2, 6))
    )
    joined = (first[0] + second[0], *(torch.cat(pair, 2) for pair in zip(first[1:], second[1:], strict=True)))
    for ours, expected in zip(joined, whole, strict=True):
        assert torch.allclose(ours, expected, rtol=0, atol=TOLERANCES[dtype])
