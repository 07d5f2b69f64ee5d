"""Stochastic rounding to bf16: up or down at random, so that the mean of a rounded number is the number.

An update of a bf16 weight by less than half its last bit would be lost by rounding to nearest; here it moves the weight
with a probability in proportion to it, and fp32 main weights are not needed. The random numbers are counted and not
drawn: a number depends on a key and on the element's place in the whole table, and on no layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.hashing import mix

_LANES = 4
"""Elements that share one 64-bit hash, 16 bits each: bf16 drops the last 16 bits of fp32."""
_LOW_BITS = 0xFFFF


def round_stochastically(values: Tensor, out: Tensor, *, key: int, rows: Tensor, first_column: int, width: int) -> None:
    """Round columns of some rows of a table: `out` gets one of the two bf16 neighbours of each of `values`.

    Args:
        values: [R, C] fp32, contiguous.
        out: [R, C] bf16, contiguous.
        key: in [0, 2^63), another one for every table and step.
        rows: [R] int64, their numbers in the whole table.
        first_column: in the whole table.
        width: columns of the whole table.
    """
    columns = values.shape[1]
    first, last = first_column // _LANES, (first_column + columns - 1) // _LANES
    groups_per_row = -(-width // _LANES)
    group = torch.arange(first, last + 1, dtype=torch.int64, device=values.device)
    lanes = mix(rows.unsqueeze(1) * groups_per_row + group, key).view(torch.int16)
    skipped = first_column - first * _LANES
    random = lanes[:, skipped : skipped + columns].to(torch.int32).bitwise_and_(_LOW_BITS)
    # Both signs count from zero: the sum carries into the kept bits with the probability of the dropped ones.
    bits = random.add_(values.view(torch.int32)).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(bits)
