"""Tables of which this rank has some rows: entries of rows that others hold are passed over by every kernel."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.gather_dot import naive as naive_dot
from kernels.gather_sum import naive as naive_sum
from kernels.segment_accumulate import naive as naive_accumulate
from kernels.select import Kernels
from tests.unit.kernels.cases import DTYPES, Shape, draw, fitting, is_interpreted, with_grads

OTHERS = [
    Shape(rows=7, tokens=5, reads=9, groups=2, width=6),
    # In registers: one group, two in one pass, two of a pass each.
    Shape(rows=7, tokens=3, reads=30, groups=1, width=258),
    Shape(rows=7, tokens=3, reads=30, groups=2, width=64),
    Shape(rows=7, tokens=3, reads=30, groups=2, width=258),
]

INTERPRETED = ((OTHERS[0], torch.bfloat16, 3), (OTHERS[0], torch.float32, 1), (OTHERS[3], torch.float32, 3))


@pytest.mark.parametrize("num_bins", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_entries_of_rows_that_others_hold_are_passed_over(
    kernels: Kernels, shape: Shape, dtype: torch.dtype, num_bins: int
) -> None:
    """To the bit what masks would make of them, whatever their coefficients are; likewise by the twins."""
    if is_interpreted(kernels) and (shape, dtype, num_bins) not in INTERPRETED:
        pytest.skip("Triton's interpreter takes seconds: a shape of each kind does")
    shape = fitting(kernels, shape)
    c = draw(shape, dtype)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(-shape.rows, 2 * shape.rows, c.ids.shape, generator=g, dtype=torch.int32)
    # Both ends of the table, and what is next to them; a token without a row of its own.
    ids[0, :4], ids[-1] = torch.tensor([-1, 0, shape.rows - 1, shape.rows]), shape.rows
    own = (ids >= 0) & (ids < shape.rows)
    mask, first_row = own.unsqueeze(2), ids.where(own, 0)
    bins = torch.randint(0, num_bins, ids.shape, generator=g, dtype=torch.int32) if num_bins > 1 else None
    x, grad_sum = c.x.repeat(1, num_bins), c.grad_sum.repeat(1, num_bins)
    poisoned, of_own = c.coef.masked_fill(~mask, float("nan")), c.coef * mask
    for gather_sum, gather_dot, accumulate in (
        (kernels.gather_sum, kernels.gather_dot, kernels.segment_accumulate),
        (naive_sum.gather_sum, naive_dot.gather_dot, naive_accumulate.segment_accumulate),
    ):
        of_sum = partial(gather_sum, bins=bins, num_bins=num_bins)
        found = with_grads(of_sum, c.table, ids, poisoned, grad_sum)
        masked = with_grads(of_sum, c.table, first_row, of_own, grad_sum)
        for actual, reference in zip(found, (*masked[:2], masked[2] * mask), strict=True):
            assert torch.equal(actual, reference)
        of_dot = partial(gather_dot, num_groups=shape.groups, bins=bins)
        found = with_grads(of_dot, c.table, ids, x, poisoned)
        masked = with_grads(of_dot, c.table, first_row, x, of_own)
        for actual, reference in zip(found, (masked[0] * mask, *masked[1:]), strict=True):
            assert torch.equal(actual, reference)
        start = torch.randn(shape.rows, shape.width, generator=g)
        actual, reference = start.clone(), start.clone()
        accumulate(actual, ids, poisoned, x, bins)
        accumulate(reference, first_row, of_own, x, bins)
        assert torch.equal(actual, reference)
