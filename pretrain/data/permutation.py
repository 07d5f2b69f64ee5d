"""Orders without a table: a bijection of [0, n) for every key, of which any value costs the same few multiplications."""

from __future__ import annotations

import math

_ROUNDS = 6
_MASK = (1 << 64) - 1


def mixed(*parts: int) -> int:
    """A number of 64 bits in which every bit of every part has a say (splitmix64's finaliser, part by part)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permuted(index: int, size: int, key: int) -> int:
    """The place of a number under a permutation of [0, size).

    A Feistel network on the smallest grid side x side that holds them, (i, j) -> (j, i + F(j) mod side). A number that
    leaves [0, size) goes through again until it is back, which is a permutation still; less than 2 side of the side^2
    places lie outside, so for large sizes hardly any does.

    Args:
        index: a number in [0, size).
        key: key of the permutation.
    """
    assert 0 <= index < size
    side = math.isqrt(size - 1) + 1
    while True:
        i, j = divmod(index, side)
        for turn in range(_ROUNDS):
            i, j = j, (i + mixed(key, turn, j)) % side
        index = i * side + j
        if index < size:
            return index
