"""Rows past 2^32 elements, in every implementation. The tables have no memory but for the pages of the rows that are
touched.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from kernels.common.rounding import Rounding
from kernels.select import Kernels

# <asm-generic/mman-common.h>; Python's mmap names it from 3.13 on.
MAP_NORESERVE = 0x4000
NUM_NEAR, WIDTH = 40, 24
NUM_FAR = 2**32 // WIDTH + NUM_NEAR + 1
"""The last NUM_NEAR rows begin past 2^32 elements; an offset of 32 bits comes out among the first."""


def zeros(dtype: torch.dtype) -> Tensor:
    """[NUM_FAR, WIDTH], of pages that come into being when they are written."""
    num_bytes = NUM_FAR * WIDTH * dtype.itemsize
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(buffer, dtype=dtype).view(NUM_FAR, WIDTH)


def test_the_last_rows_of_a_large_table(kernels: Kernels) -> None:
    g = torch.Generator().manual_seed(0)
    near = torch.randn(NUM_NEAR, WIDTH, generator=g).bfloat16()
    ids = torch.randint(0, NUM_NEAR, (5, 7), generator=g)
    far_ids = ids + NUM_FAR - NUM_NEAR
    coef = torch.randn(5, 7, 2, generator=g).bfloat16()
    x = torch.randn(5, WIDTH, generator=g).bfloat16()

    far = zeros(torch.bfloat16)
    far[-NUM_NEAR:] = near
    assert torch.equal(kernels.gather_sum(far, far_ids, coef), kernels.gather_sum(near, ids, coef))
    assert torch.equal(kernels.gather_dot(far, far_ids, x, 2), kernels.gather_dot(near, ids, x, 2))

    far_sums, near_sums = zeros(torch.float32), torch.zeros(NUM_NEAR, WIDTH)
    kernels.segment_accumulate(far_sums, far_ids, coef, x)
    kernels.segment_accumulate(near_sums, ids, coef, x)
    assert torch.equal(far_sums[-NUM_NEAR:], near_sums)
    assert not far_sums[: 2 * NUM_NEAR].any()


def test_an_update_of_the_last_rows_of_a_large_table(kernels: Kernels) -> None:
    """Rounded by the numbers of near rows, far ones get the same bits."""
    g = torch.Generator().manual_seed(0)
    near, gradient = torch.randn(NUM_NEAR, WIDTH, generator=g).bfloat16(), torch.randn(6, WIDTH, generator=g)
    rows, factors, rounding = torch.randperm(NUM_NEAR, generator=g)[:6], torch.randn(6, generator=g), Rounding(2**62)
    far = zeros(torch.bfloat16)
    far[-NUM_NEAR:] = near
    kernels.row_update(far, gradient, factors, 1.0, rounding, rows + NUM_FAR - NUM_NEAR, rows)
    before = near.clone()
    kernels.row_update(near, gradient, factors, 1.0, rounding, rows)
    assert not torch.equal(near, before)
    assert torch.equal(far[-NUM_NEAR:], near)
    assert not far[: 2 * NUM_NEAR].any()
