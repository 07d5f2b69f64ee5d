"""Reference of `row_squares`: the formula in plain PyTorch, the oracle of every other implementation.

Legend: N rows, W columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_SUMS = 32


def row_squares(gradient: Tensor) -> Tensor:
    """Sum of squares of each row, in fp32 and in one order of additions.

    out[i] = sum_d gradient[i, d]^2, as 32 sums of the columns that are the same modulo 32, in their order; then the
    upper half of these is added to the lower half until one is left.

    Args:
        gradient: [N, W], fp32 or bf16.

    Returns:
        [N] fp32.
    """
    sums = torch.zeros(gradient.shape[0], NUM_SUMS, device=gradient.device)
    for column in range(gradient.shape[1]):
        sums[:, column % NUM_SUMS] += gradient[:, column].float() ** 2
    while sums.shape[1] > 1:
        lower, upper = sums.chunk(2, dim=1)
        sums = lower + upper
    return sums[:, 0]
