"""Reference of `row_update`: the formula in plain PyTorch, the oracle of every other implementation.

Legend: R rows of a table, N rows of a gradient, W columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.rounding import Rounding
from kernels.segment_accumulate.naive import rounded_row


def row_update(
    weights: Tensor,
    gradient: Tensor,
    factors: Tensor,
    keep: float = 1.0,
    rounding: Rounding | None = None,
    rows: Tensor | None = None,
    numbers: Tensor | None = None,
) -> None:
    """Update rows of a table in place.

    weights[r_i] <- round(keep weights[r_i] + factors[i] gradient[i]), in fp32, each product rounded, with r_i = rows[i]

    Where factors[i] is 0, and keep is 1 or `rows` are given, the row stays as it is, whatever its gradient.

    Args:
        weights: [R, W], fp32 or bf16.
        gradient: [N, W], fp32 or bf16.
        factors: [N] fp32.
        keep: share of the weights that a decay leaves.
        rounding: random numbers that round bf16 weights; None for fp32 ones.
        rows: [N] int64 in [0, R), different ones where factors are not 0; None: the first N.
        numbers: [N] int64, of the rows where they are rounded; None: `rows`.
    """
    keep_, moved = torch.tensor(keep, dtype=torch.float32), range(len(gradient))
    for i in moved:
        if factors[i] == 0 and (keep_ == 1 or rows is not None):
            continue
        row = i if rows is None else int(rows[i])
        number = row if numbers is None else int(numbers[i])
        updated = keep_ * weights[row].float() + factors[i] * gradient[i].float()
        weights[row] = updated if rounding is None else rounded_row(updated, number, rounding)
