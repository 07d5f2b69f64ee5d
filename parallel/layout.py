"""Arithmetic of a layout, without any process group: padding, coefficients and ids of a rank."""

from __future__ import annotations

import math


def padded_size(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


def coefficients_per_rank(num_scores: int, num_ranks: int) -> int:
    """n: coefficients of a row that one rank needs for its columns, see `parallel.exchange.spread_coefficients`."""
    return num_scores // math.gcd(num_scores, num_ranks)


def bytes_per_id(num_ids: int) -> tuple[int, int]:
    """Whole bytes that ids below `num_ids` need, and whether half a byte more, see `parallel.packed_rows`."""
    half_bytes = max(1, -(-(num_ids - 1).bit_length() // 4))
    return divmod(half_bytes, 2)


def packed_bytes(ids: int, num_ids: int) -> int:
    """Bytes of so many packed ids below `num_ids`."""
    whole, odd = bytes_per_id(num_ids)
    return ids * whole + odd * -(-ids // 2)
