"""The same bits from the same inputs: whatever ran before, whatever memory held, with any number of threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.common.rounding import Rounding
from kernels.implementations import unavailable
from kernels.select import Kernels, select_kernels
from tests.unit.kernels.cases import DTYPES, SHAPES, Shape, assert_same_with_any_threads, draw, fitting, main_grad_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_are_bit_identical(kernels: Kernels, dtype: torch.dtype) -> None:
    c = draw(fitting(kernels, SHAPES[-1]), dtype)

    def run() -> list[Tensor]:
        table = main_grad_table(c.table)
        coef, x = c.coef.clone().requires_grad_(), c.x.clone().requires_grad_()
        outs = [kernels.gather_sum(table, c.ids, coef), kernels.gather_dot(table, c.ids, x)]
        torch.autograd.backward(outs, [c.grad_sum, c.grad_dot])
        assert coef.grad is not None
        assert x.grad is not None
        return [*outs, table.main_grad, coef.grad, x.grad]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_no_memory_is_read_before_it_is_written(kernels: Kernels) -> None:
    """Whatever is allocated holds NaN at first: outputs, and the pieces of long runs."""
    c = draw(Shape(rows=2, tokens=20, reads=5, groups=2, width=24), torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(8).isnan().all()
        table = main_grad_table(c.table)
        coef, x = c.coef.clone().requires_grad_(), c.x.clone().requires_grad_()
        outs = [kernels.gather_sum(table, c.ids, coef), kernels.gather_dot(table, c.ids, x)]
        torch.autograd.backward(outs, [c.grad_sum, c.grad_dot])
    finally:
        torch.use_deterministic_algorithms(False)
    for tensor in (*outs, table.main_grad, coef.grad, x.grad):
        assert tensor is not None
        assert tensor.isfinite().all()


@pytest.mark.skipif(unavailable("cpu", "cpu") is not None, reason=str(unavailable("cpu", "cpu")))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    kernels = select_kernels("cpu", device_type="cpu")
    c = draw(SHAPES[-1], dtype)
    ids = c.ids.clone()
    # A row that most entries read, which several threads then share.
    ids[:, :9] = 3

    def run() -> list[Tensor]:
        accumulator = torch.zeros_like(c.table)
        kernels.segment_accumulate(accumulator, ids.clone(), c.coef, c.x)
        rounded = torch.zeros_like(c.table, dtype=torch.bfloat16)
        kernels.segment_accumulate(rounded, ids.clone(), c.coef, c.x, rounding=Rounding(1))
        return [
            kernels.gather_sum(c.table, ids, c.coef),
            kernels.gather_dot(c.table, ids, c.x, 2),
            accumulator,
            rounded,
        ]

    assert_same_with_any_threads(run)
