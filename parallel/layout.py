"""Arithmetic of a layout, without any process group: padding, and coefficients of a rank."""

from __future__ import annotations

import math


def padded_size(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


def coefficients_per_rank(num_scores: int, num_ranks: int) -> int:
    """n: coefficients of a row that one rank needs for its columns, see `parallel.exchange.spread_coefficients`."""
    return num_scores // math.gcd(num_scores, num_ranks)
