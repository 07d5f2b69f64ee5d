"""Kernels of updates by row against their twins, to the bit, in every implementation.

Triton's kernels run in its interpreter (`conftest.py`), in few launches.

Legend: R rows of a table, N rows of a gradient, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.common.rounding import Rounding
from kernels.implementations import Implementation, unavailable
from kernels.row_squares import naive as naive_squares
from kernels.row_update import naive as naive_update
from kernels.select import Kernels, select_kernels
from tests.unit.kernels.cases import assert_same_with_any_threads

FAST: tuple[Implementation, ...] = ("torch", "cpu")
NAN = float("nan")


def chosen(implementation: Implementation) -> Kernels:
    if reason := unavailable(implementation, "cpu"):
        pytest.skip(f"{implementation} {reason}")
    return select_kernels(implementation, device_type="cpu")


@dataclass(frozen=True)
class Case:
    """Operands of `row_update`."""

    weights: Tensor
    gradient: Tensor
    factors: Tensor
    keep: float
    rounding: Rounding | None
    rows: Tensor | None
    numbers: Tensor | None

    def updated(self, update: object) -> Tensor:
        weights = self.weights.clone()
        assert callable(update)
        update(weights, self.gradient, self.factors, self.keep, self.rounding, self.rows, self.numbers)
        return weights


def draw(
    num: int,
    width: int,
    weights: torch.dtype,
    gradient: torch.dtype,
    *,
    keep: float = 1.0,
    by: str = "place",
    seed: int = 0,
) -> Case:
    """A table of twice the rows; a factor in three is 0, and where that means something, its gradient NaN.

    Args:
        by: "place": the first rows; "rows": some, of which those that stay repeat the first; "numbers": with other numbers.
    """
    g = torch.Generator().manual_seed(seed)
    table, changes = (
        torch.randn(2 * num, width, generator=g).to(weights),
        torch.randn(num, width, generator=g).to(gradient),
    )
    factors = torch.randn(num, generator=g).mul_(torch.arange(num) % 3 != 2)
    rows = torch.randperm(2 * num, generator=g)[:num] if by != "place" else None
    if keep == 1 or rows is not None:
        changes[factors == 0] = NAN
        if rows is not None and num:
            rows[factors == 0] = rows[0].clone()
    numbers = torch.randint(0, 2**40, (num,), generator=g) if by == "numbers" else None
    rounding = Rounding(2**62 + 5, first_row=2**33 + 7, first_column=3) if weights == torch.bfloat16 else None
    return Case(table, changes, factors, keep, rounding, rows, numbers)


CASES = {
    f"{case.weights.dtype} {case.gradient.dtype} {num} x {width}, keep {keep}, by {by}": case
    for num, width, weights, gradient, keep, by in (
        (7, 64, torch.bfloat16, torch.float32, 1.0, "place"),
        (7, 65, torch.bfloat16, torch.bfloat16, 0.9, "place"),
        (5, 240, torch.bfloat16, torch.float32, 1.0, "numbers"),
        (9, 10, torch.float32, torch.float32, 0.9, "place"),
        (9, 33, torch.float32, torch.bfloat16, 1.0, "rows"),
        (3, 1288, torch.bfloat16, torch.float32, 1.0, "rows"),
        (8, 96, torch.bfloat16, torch.float32, 0.999, "rows"),
    )
    for case in [draw(num, width, weights, gradient, keep=keep, by=by)]
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("name", CASES)
def test_updates_have_the_bits_of_their_twin(kernels: Kernels, name: str) -> None:
    case = CASES[name]
    actual, expected = case.updated(kernels.row_update), case.updated(naive_update.row_update)
    assert torch.equal(bits(actual), bits(expected))
    assert actual.isfinite().all()
    assert not torch.equal(actual, case.weights)
    found, wanted = kernels.row_squares(case.gradient), naive_squares.row_squares(case.gradient)
    assert found.dtype == torch.float32
    assert torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("implementation", FAST)
@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(0, 40),
    width=st.integers(1, 150),
    weights=st.sampled_from([torch.float32, torch.bfloat16]),
    gradient=st.sampled_from([torch.float32, torch.bfloat16]),
    way=st.sampled_from([(1.0, "place"), (0.5, "place"), (1.0, "rows"), (0.25, "rows"), (1.0, "numbers")]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_has_the_bits_of_the_twin(
    implementation: Implementation,
    num: int,
    width: int,
    weights: torch.dtype,
    gradient: torch.dtype,
    way: tuple[float, str],
    seed: int,
) -> None:
    kernels = chosen(implementation)
    case = draw(num, width, weights, gradient, keep=way[0], by=way[1], seed=seed)
    assert torch.equal(bits(case.updated(kernels.row_update)), bits(case.updated(naive_update.row_update)))
    assert torch.equal(bits(kernels.row_squares(case.gradient)), bits(naive_squares.row_squares(case.gradient)))


def test_the_twin_is_the_formula_in_fp64() -> None:
    for keep, by in ((1.0, "rows"), (0.9, "rows"), (0.9, "place")):
        case = draw(12, 100, torch.float32, torch.float32, keep=keep, by=by)
        rows = torch.arange(12) if case.rows is None else case.rows
        wanted = case.weights.double()
        for factor, row, gradient in zip(case.factors.double(), rows, case.gradient.double(), strict=True):
            if factor != 0 or (keep != 1 and by == "place"):
                wanted[row] = keep * wanted[row] + factor * gradient
        # Two products and a sum are rounded, each by 2^-24 of the largest term, below 16.
        assert torch.allclose(case.updated(naive_update.row_update).double(), wanted, rtol=0, atol=3 * 16 * 2.0**-24)
    squares = naive_squares.row_squares(case.gradient).double()
    # At most three terms to a partial sum, and five levels.
    assert torch.allclose(squares, case.gradient.double().square().sum(1), rtol=10 * 2.0**-24, atol=0)


def test_rows_are_rounded_by_their_place_alone(kernels: Kernels) -> None:
    """The same rows by place, by a list in another order, and as part of a larger table."""
    whole = draw(8, 40, torch.bfloat16, torch.float32)
    expected = whole.updated(kernels.row_update)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    listed = whole.weights.clone()
    kernels.row_update(listed, whole.gradient[order], whole.factors[order], 1.0, whole.rounding, order)
    assert torch.equal(listed, expected)
    part = whole.weights[3:8, 8:24].contiguous()
    rounding = Rounding(2**62 + 5, first_row=2**33 + 7 + 3, first_column=3 + 8)
    kernels.row_update(part, whole.gradient[3:8, 8:24].contiguous(), whole.factors[3:8], 1.0, rounding)
    assert torch.equal(part, expected[3:8, 8:24])


def test_what_an_update_does_not_know_is_refused(kernels: Kernels) -> None:
    weights, gradient, factors = torch.ones(4, 6), torch.ones(4, 6), torch.ones(4)
    with pytest.raises(ValueError, match="need contiguous rows"):
        kernels.row_update(weights.t().contiguous().t(), gradient, factors)
    with pytest.raises(ValueError, match="updates by row take both in fp32 or bf16"):
        kernels.row_update(weights.bfloat16(), gradient, factors)
    with pytest.raises(ValueError, match="updates by row take both in fp32 or bf16"):
        kernels.row_update(weights, gradient.double(), factors)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    kernels = chosen("cpu")
    case = draw(300, 72, torch.bfloat16, torch.float32, by="rows")

    def run() -> tuple[Tensor, Tensor]:
        return case.updated(kernels.row_update), kernels.row_squares(case.gradient.nan_to_num())

    assert_same_with_any_threads(run)
