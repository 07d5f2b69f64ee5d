"""Attention in tiles on a GPU: what its definition says, without a mask in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamem.attention.backends import fused_attention
from megamem.attention.blockwise import tiled_attention
from megamem.attention.core import causal_attention
from megamem.attention.documents import Documents, Slice

HEADS, WIDTH = 8, 64


def inputs(gpu: torch.device, dtype: torch.dtype, queries: int, keys: int, key_heads: int) -> list[Tensor]:
    """Query, key and value, one sequence of them."""
    generator = torch.Generator(gpu).manual_seed(0)
    sizes = ((queries, HEADS), (keys, key_heads), (keys, key_heads))
    return [
        torch.randn(tokens, 1, heads, WIDTH, generator=generator, device=gpu).to(dtype).requires_grad_()
        for tokens, heads in sizes
    ]


def last_tokens(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of the last tokens to themselves and all before, [q, 1, n d]: a rectangle and a square."""
    before, length = len(key) - len(query), len(key)
    queries = Slice(before, length)
    of_keys = (Slice(0, before), Slice(before, length, offset=before))
    tiles = [tile for keys in of_keys for tile in Documents(length, None).tiles(queries, keys)]
    return tiled_attention(query, key, value, tiles, WIDTH**-0.5).flatten(2)


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / WIDTH**0.5
    q, k = scores.shape[-2:]
    later = torch.ones(q, k, dtype=torch.bool, device=scores.device).triu(k - q + 1)
    return torch.einsum("bnst,tbnd->sbnd", scores.masked_fill(later, -torch.inf).softmax(-1), value).flatten(2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-3)], ids=str)
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("keys", [256, 1024])
def test_the_last_tokens_attend_to_themselves_and_all_before(
    gpu: torch.device, dtype: torch.dtype, tolerance: float, key_heads: int, keys: int
) -> None:
    parts = inputs(gpu, dtype, 256, keys, key_heads)
    wide = [part.detach().double().requires_grad_() for part in parts]
    out, expected = last_tokens(*parts), plain_attention(*wide)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(out, parts, upstream.to(dtype))
    for actual, plain in zip(
        (out, *gradients), (expected, *torch.autograd.grad(expected, wide, upstream)), strict=True
    ):
        assert float((actual - plain).abs().max()) <= tolerance * float(plain.abs().max())


def test_no_mask_is_made(gpu: torch.device) -> None:
    queries, keys = 8192, 32768
    parts = inputs(gpu, torch.bfloat16, queries, keys, 2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    last_tokens(*parts).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < queries * keys


@pytest.mark.parametrize("key_heads", [8, 2])
def test_whole_sequences_take_a_fused_kernel_both_ways(gpu: torch.device, key_heads: int) -> None:
    parts = inputs(gpu, torch.bfloat16, 1024, 1024, key_heads)
    wide = [part.detach().double().requires_grad_() for part in parts]
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with fused_attention(), torch.profiler.profile(activities=activities) as profile:
        out = causal_attention(*parts, WIDTH**-0.5, None)
        out.square().sum().backward()
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages()).lower()
    assert "softmax" not in names
    assert any(word in names for word in ("cudnn", "flash", "fmha"))
    expected = plain_attention(*wide)
    expected.square().sum().backward()
    assert float((out - expected).abs().max()) <= 2e-2 * float(expected.abs().max())
    for part, reference in zip(parts, wide, strict=True):
        assert part.grad is not None
        assert reference.grad is not None
        assert float((part.grad - reference.grad).abs().max()) <= 3e-2 * float(reference.grad.abs().max())
