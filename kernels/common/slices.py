"""Splitting a pass over tokens so that its temporaries stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

# 2^18 fp32 elements are 1 MiB, about one core's share of cache.
_SLICE_ELEMENTS = 1 << 18


def token_slices(num_tokens: int, elements_per_token: int) -> Iterator[slice]:
    """Slices of [0, num_tokens) that hold about 2^18 elements each."""
    step = max(1, _SLICE_ELEMENTS // max(1, elements_per_token))
    return (slice(start, start + step) for start in range(0, num_tokens, step))
