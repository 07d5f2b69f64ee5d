"""64-bit mixing on int64 tensors: the base of the counter-based generator and of the keyed shuffle.

A pure function of its arguments that gives the same bits on every device, and wraps modulo 2^64.
"""

from __future__ import annotations

from torch import Tensor

_GOLDEN_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MULTIPLIER_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own one drags the sign along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(counter: Tensor, key: int) -> Tensor:
    """The `counter`-th output of a SplitMix64 stream that starts at `key` (Steele, Lea and Flood, 2014).

    Args:
        counter: int64, any shape.
        key: start of the stream, in [0, 2^63).

    Returns:
        int64 of the same shape; all 64 bits are uniform.
    """
    z = (counter + 1) * _GOLDEN_GAMMA + key
    z = (z ^ _shift_right(z, 30)) * _MULTIPLIER_1
    z = (z ^ _shift_right(z, 27)) * _MULTIPLIER_2
    return z ^ _shift_right(z, 31)
