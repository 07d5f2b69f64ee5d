"""Stochastic rounding to bf16: up or down at random, so that the mean of a rounded number is the number.

A change of a bf16 number by less than half its last bit would be lost by rounding to nearest; here it moves the number
with a probability in proportion to it, and fp32 copies are not needed. The random numbers are counted and not
drawn: a number depends on a key and on the element's place in the whole table, and on no layout. `rounding.h` and
`rounding_triton.py` have the same function, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN_GAMMA = -1640531527  # 0x9E3779B9 as int32
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = -2073254261  # 0x846CA68B as int32
LEVELS = 256
"""Keys that one rounding may use: its own, and those behind it where it adds up in several steps."""


@dataclass(frozen=True)
class Rounding:
    """Random numbers of one rounding of a part of a table.

    Attributes:
        key: number in [0, 2^63), another one for every table and rounding.
        first_row, first_column: place of the part in the whole table.
    """

    key: int
    first_row: int = 0
    first_column: int = 0


def round_stochastically(values: Tensor, out: Tensor, rounding: Rounding, rows: Tensor) -> None:
    """Round some rows of a part of a table: `out` gets one of the two bf16 neighbours of each of `values`.

    Numbers that are not finite stay so.

    Args:
        values: [R, C] fp32, contiguous.
        out: [R, C] bf16, contiguous.
        rounding: random numbers of the part that begins with the first of the C columns.
        rows: [R] int64, their numbers in the part.
    """
    random = random_bits(rows + rounding.first_row, rounding.first_column, values.shape[1], rounding.key)
    bits = values.view(torch.int32)
    # Infinity has no neighbour above it, and a NaN with all bits set would become -0.
    random.masked_fill_(~values.isfinite(), 0)
    # Both signs count from zero: the sum carries into the kept bits with the probability of the dropped ones.
    out.view(torch.int16).copy_(random.add_(bits).bitwise_right_shift_(16))


def random_bits(rows: Tensor, first_column: int, num_columns: int, key: int) -> Tensor:
    """[R, C] int32 in [0, 2^16), as many bits as bf16 drops of fp32: uniform, and a function of key, row and column.

    Args:
        rows: [R] int64, in the whole table.
        first_column: number of the first column in the whole table.
        num_columns: C.
        key: number in [0, 2^63).
    """
    numbers = (rows >> 32).to(torch.int32).mul_(_GOLDEN_GAMMA) ^ rows.to(torch.int32)
    of_row = _mix(_mix(numbers ^ _signed(key >> 32)) + _signed(key))
    columns = torch.arange(first_column, first_column + num_columns, dtype=torch.int32, device=rows.device)
    return (_mix(of_row.unsqueeze(1) ^ columns.mul_(_GOLDEN_GAMMA)) >> 16).bitwise_and_(0xFFFF)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which each bit depends on all (the constants are those of Wellons' lowbias32)."""
    x = (x ^ _shift_right(x, 16)).mul_(_MULTIPLIER_1)
    x ^= _shift_right(x, 15)
    x *= _MULTIPLIER_2
    return x.bitwise_xor_(_shift_right(x, 16))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int32's own one drags the sign along."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    """The low 32 bits of a number, as an int32 has them."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
