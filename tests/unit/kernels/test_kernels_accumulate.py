"""Accumulation into rows against its naive twin, in fp32, fp64 and bf16, in every implementation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common.rounding import Rounding
from kernels.common.tables import table_gradient
from kernels.segment_accumulate import naive as naive_accumulate
from kernels.select import Kernels
from tests.unit.kernels.cases import DTYPES, SHAPES, Shape, assert_close, draw, fitting, shapes


@pytest.mark.parametrize(
    ("shape", "dtype", "accumulator_dtype"),
    [
        # Every pair.
        (shape, dtype, (torch.float32, torch.float64)[(number + other) % 2])
        for number, shape in enumerate(SHAPES)
        for other, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_segment_accumulate_equals_its_twin(
    kernels: Kernels, shape: Shape, dtype: torch.dtype, accumulator_dtype: torch.dtype
) -> None:
    """To the bit; Triton for rows that are read no more often than its blocks are long, as all are here."""
    shape = fitting(kernels, shape)
    c = draw(shape, dtype)
    start = torch.randn(shape.rows, shape.width, generator=torch.Generator().manual_seed(1)).to(accumulator_dtype)
    actual, reference = start.clone(), start.clone()
    kernels.segment_accumulate(actual, c.ids, c.coef, c.x)
    naive_accumulate.segment_accumulate(reference, c.ids, c.coef, c.x)
    assert torch.equal(actual, reference)
    assert not torch.equal(actual, start)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shape=shapes, num_blocks=st.integers(1, 4), seed=st.integers(0, 1000))
def test_accumulation_of_blocks_equals_its_twin(kernels: Kernels, shape: Shape, num_blocks: int, seed: int) -> None:
    shape = fitting(kernels, shape)
    c = draw(shape, seed=seed)
    g = torch.Generator().manual_seed(seed)
    block = torch.randint(0, num_blocks, c.ids.shape, generator=g)
    vec = torch.randn(shape.tokens, num_blocks * shape.width, generator=g, dtype=torch.float64)
    actual, reference = c.table.clone(), c.table.clone()
    kernels.segment_accumulate(actual, c.ids, c.coef, vec, block)
    naive_accumulate.segment_accumulate(reference, c.ids, c.coef, vec, block)
    assert_close(actual, reference, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bf16_accumulator_is_rounded_as_its_twin_is(kernels: Kernels, shape: Shape, dtype: torch.dtype) -> None:
    """To the bit, as one of the two numbers beside the sum in fp32."""
    shape = fitting(kernels, shape)
    c = draw(shape, dtype)
    start = torch.randn(shape.rows, shape.width, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounding = Rounding(2**62 + 5, first_row=7, first_column=3)
    actual, reference, sums = start.clone(), start.clone(), start.float()
    kernels.segment_accumulate(actual, c.ids, c.coef, c.x, rounding=rounding)
    naive_accumulate.segment_accumulate(reference, c.ids, c.coef, c.x, rounding=rounding)
    naive_accumulate.segment_accumulate(sums, c.ids, c.coef, c.x)
    assert torch.equal(actual, reference)
    assert actual.numel() < 1000 or not torch.equal(actual, sums.bfloat16())
    assert ((actual - sums).abs() < 2**-7 * sums.abs()).all()


def test_small_terms_are_not_lost_beside_large_ones(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers beside 256 are 2 apart: a half goes up with the probability 1/4, by rows that are added to again and
    again. The mean of n elements after k additions is 256 + k / 2, to 2 sqrt(k / n) sqrt(1/4 (1 - 1/4)) at one sigma."""
    # One program for a row.
    monkeypatch.setattr("kernels.common.tiles._MAX_RUN_COLUMNS", 64)
    num_rows, width, times = 8, 40, 4
    accumulator = torch.full((num_rows, width), 256.0, dtype=torch.bfloat16)
    ids, ones = torch.arange(num_rows).view(num_rows, 1), torch.ones(num_rows, 1, 1)
    for time in range(times):
        half = torch.full((num_rows, width), 0.5)
        kernels.segment_accumulate(accumulator, ids, ones, half, rounding=Rounding(1000 + 256 * time))
    off = float(accumulator.double().mean()) - 256 - times / 2
    assert abs(off) < 5 * 2 * (times / (num_rows * width) * 3 / 16) ** 0.5
    assert accumulator.unique().numel() > 3


def test_segment_accumulate_touches_no_other_row(kernels: Kernels) -> None:
    c = draw(Shape(rows=12, tokens=6, reads=3, groups=2, width=8), torch.float32)
    accumulator = torch.zeros(12, 8)
    accumulator[1::2] = float("nan")
    kernels.segment_accumulate(accumulator, c.ids % 6 * 2, c.coef, c.x)
    assert accumulator[1::2].isnan().all()
    assert accumulator[0::2].isfinite().all()


def test_segment_accumulate_of_no_tokens_changes_nothing(kernels: Kernels) -> None:
    accumulator = torch.ones(4, 6)
    kernels.segment_accumulate(
        accumulator, torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3, 2), torch.zeros(0, 6)
    )
    assert torch.equal(accumulator, torch.ones(4, 6))


def test_every_row_at_once_adds_up(kernels: Kernels) -> None:
    """All tokens on one row: the longest run that a segment can have."""
    shape = fitting(kernels, Shape(rows=3, tokens=64, reads=16, groups=2, width=32))
    tokens, reads, width = shape.tokens, shape.reads, shape.width
    c = draw(shape, torch.float32)
    ids = torch.ones(tokens, reads, dtype=torch.int64)
    gradient = table_gradient(c.table, ids, c.coef, c.x, accumulate=kernels.segment_accumulate)
    expected = (c.coef.double().sum(1).repeat_interleave(width // 2, dim=1) * c.x.double()).sum(0)
    assert_close(gradient[1], expected, torch.float32)
    assert not gradient[0].any()
    assert not gradient[2].any()


@pytest.mark.parametrize("block", [2, 3, 7])
def test_long_runs_are_added_up_in_pieces(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Several levels of pieces: one row that everybody reads, and rows whose runs begin and end anywhere."""
    tokens, often = (6, slice(1, 4)) if block == 7 else (4, slice(1, 3))
    if kernels.implementations["segment_accumulate"] == "triton":
        monkeypatch.setattr("kernels.segment_accumulate.triton_op.BLOCK", block)
    for rows, seed in ((1, 0), (2, 1), (5, 2), (40, 3)):
        c = draw(Shape(rows=rows, tokens=tokens, reads=9, groups=1, width=11), seed=seed)
        ids = c.ids.clone()
        ids[often] = rows // 2
        actual, reference = torch.zeros_like(c.table), torch.zeros_like(c.table)
        kernels.segment_accumulate(actual, ids, c.coef, c.x)
        naive_accumulate.segment_accumulate(reference, ids, c.coef, c.x)
        assert_close(actual, reference, torch.float64)
