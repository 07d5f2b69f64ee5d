"""Reference of `segment_accumulate`: one loop, the oracle of every other implementation.

Legend: T tokens, J rows read per token, C column groups, W columns (C divides W), B bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.rounding import Rounding

_WORD = 2**32 - 1
_GOLDEN_GAMMA = 0x9E3779B9


def segment_accumulate(
    accumulator: Tensor,
    ids: Tensor,
    coef: Tensor,
    vec: Tensor,
    bins: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Add the table gradient of a gather in place.

    accumulator[ids[t, j], c W/C + d] += coef[t, j, c] vec[t, bins[t, j] W + c W/C + d], in the order of (t, j)

    Args:
        accumulator: [rows, W], fp32 in training (Megatron's main_grad).
        ids: [T, J], int32 or int64. Rows may repeat. An id outside [0, rows) is of a row that others hold: its entry is
            passed over.
        coef: [T, J, C].
        vec: [T, B W].
        bins: [T, J], int32 or int64 in [0, B), or None if B is 1.
        rounding: random numbers for a bf16 accumulator, whose rows are added to in fp32 and rounded stochastically,
            once each.
    """
    if rounding is not None:
        sums = accumulator.float()
        segment_accumulate(sums, ids, coef, vec, bins)
        for number in range(len(sums)):
            if (ids == number).any():
                accumulator[number] = rounded_row(sums[number], number, rounding)
        return
    num_groups = coef.shape[2]
    for t in range(ids.shape[0]):
        vectors = vec[t].view(-1, num_groups, accumulator.shape[1] // num_groups).to(accumulator.dtype)
        for j in range(ids.shape[1]):
            if not 0 <= ids[t, j] < accumulator.shape[0]:
                continue
            row = vectors[0 if bins is None else bins[t, j]]
            accumulator[ids[t, j]] += (coef[t, j].to(accumulator.dtype).unsqueeze(1) * row).flatten()


def rounded_row(sums: Tensor, row: int, rounding: Rounding) -> Tensor:
    """A row [W] in bf16: the lower half of each word is dropped behind the addition of as many random bits."""
    row += rounding.first_row
    of_row = _mixed((row >> 32) * _GOLDEN_GAMMA ^ row ^ rounding.key >> 32)
    of_row = _mixed(of_row + rounding.key)
    halves = []
    # Host sync: a reference counts in Python's whole numbers.
    for column, word in enumerate(sums.view(torch.int32).tolist(), rounding.first_column):
        is_finite = word >> 23 & 0xFF != 0xFF
        random = _mixed(of_row ^ column * _GOLDEN_GAMMA) >> 16 if is_finite else 0
        halves.append((word + random & _WORD) >> 16)
    # Numbers from 2^15 on stand for negative ones.
    return torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def _mixed(x: int) -> int:
    """A bijection of words of 32 bits (Wellons' lowbias32)."""
    x &= _WORD
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    x = (x ^ x >> 15) * 0x846CA68B & _WORD
    return x ^ x >> 16
