"""The memory kernels against their naive twins: forward, every gradient, and accumulation into `main_grad`, in every
implementation.

Triton's kernels run in its interpreter where there is no GPU (`tests/conftest.py`); `tests/gpu` runs the same
comparisons on one.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.common.rounding import Rounding
from kernels.common.tables import table_gradient
from kernels.gather_dot import naive as naive_dot
from kernels.gather_sum import naive as naive_sum
from kernels.implementations import Implementation, unavailable
from kernels.segment_accumulate import naive as naive_accumulate
from kernels.select import Kernels, select_kernels

# Largest error over the largest element of the reference, which is computed from the same inputs in float64.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)

Gather = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    rows: int
    tokens: int
    reads: int
    groups: int
    width: int


SHAPES = [
    Shape(rows=7, tokens=5, reads=3, groups=1, width=8),
    Shape(rows=7, tokens=5, reads=3, groups=2, width=8),
    Shape(rows=11, tokens=3, reads=1, groups=2, width=6),
    Shape(rows=1, tokens=4, reads=5, groups=1, width=3),
    Shape(rows=13, tokens=1, reads=4, groups=3, width=15),
    Shape(rows=5, tokens=2, reads=2, groups=1, width=1),
    # More than one chunk of tokens.
    Shape(rows=101, tokens=70, reads=17, groups=2, width=258),
]


class Case(NamedTuple):
    table: Tensor
    ids: Tensor
    coef: Tensor
    x: Tensor
    grad_sum: Tensor
    grad_dot: Tensor


IMPLEMENTATIONS: tuple[Implementation, ...] = ("torch", "cpu", "triton")


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every implementation that this machine can run; the others are skipped with the reason."""
    if reason := unavailable(request.param, "cpu"):
        pytest.skip(f"{request.param} {reason}")
    return select_kernels(request.param, device_type="cpu")


def fitting(kernels: Kernels, shape: Shape) -> Shape:
    """The shape with two tokens for Triton's interpreter, which takes 20 ms per entry; its kernels make no chunks of
    tokens.
    """
    return replace(shape, tokens=min(shape.tokens, 2)) if is_interpreted(kernels) else shape


def is_interpreted(kernels: Kernels) -> bool:
    return kernels.implementations["gather_sum"] == "triton"


def draw(shape: Shape, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype)

    tokens, reads, width = shape.tokens, shape.reads, shape.width
    return Case(
        table=normal(shape.rows, width),
        ids=torch.randint(0, shape.rows, (tokens, reads), generator=g),
        coef=normal(tokens, reads, shape.groups),
        x=normal(tokens, width),
        grad_sum=normal(tokens, width),
        grad_dot=normal(tokens, reads, 1),
    )


def with_grads(gather: Gather, table: Tensor, ids: Tensor, other: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """Output and both gradients."""
    table, other = table.detach().clone().requires_grad_(), other.detach().clone().requires_grad_()
    out = gather(table, ids, other)
    out.backward(grad_out)
    assert table.grad is not None
    assert other.grad is not None
    return out.detach(), table.grad, other.grad


def wide(*tensors: Tensor) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def assert_close(actual: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == reference.shape
    if reference.numel():
        error = (actual.double() - reference).abs().max() / reference.abs().max().clamp_min(1e-3)
        assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathers_equal_their_twins(kernels: Kernels, shape: Shape, dtype: torch.dtype) -> None:
    c = draw(fitting(kernels, shape), dtype)
    for actual, reference in zip(
        with_grads(kernels.gather_sum, c.table, c.ids, c.coef, c.grad_sum),
        with_grads(naive_sum.gather_sum, *wide(c.table, c.ids, c.coef, c.grad_sum)),
        strict=True,
    ):
        assert actual.dtype == dtype
        assert_close(actual, reference, dtype)
    for num_groups in {1, shape.groups}:
        grad_dot = c.grad_dot.expand(-1, -1, num_groups)
        for actual, reference in zip(
            with_grads(partial(kernels.gather_dot, num_groups=num_groups), c.table, c.ids, c.x, grad_dot),
            with_grads(partial(naive_dot.gather_dot, num_groups=num_groups), *wide(c.table, c.ids, c.x, grad_dot)),
            strict=True,
        ):
            assert actual.dtype == dtype
            assert_close(actual, reference, dtype)


shapes = st.builds(
    lambda rows, tokens, reads, groups, per_group: Shape(rows, tokens, reads, groups, groups * per_group),
    st.integers(1, 9),
    st.integers(0, 6),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 5),
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_gathers_equal_their_twins_at_any_shape(kernels: Kernels, shape: Shape, seed: int) -> None:
    c = draw(fitting(kernels, shape), seed=seed)
    for gather, twin, other, grad in (
        (kernels.gather_sum, naive_sum.gather_sum, c.coef, c.grad_sum),
        (kernels.gather_dot, naive_dot.gather_dot, c.x, c.grad_dot),
    ):
        for actual, reference in zip(
            with_grads(gather, c.table, c.ids, other, grad),
            with_grads(twin, c.table, c.ids, other, grad),
            strict=True,
        ):
            assert_close(actual, reference, torch.float64)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shape=shapes, num_blocks=st.integers(1, 5), seed=st.integers(0, 1000))
def test_sums_of_blocks_are_sums_with_the_other_entries_zeroed(
    kernels: Kernels, shape: Shape, num_blocks: int, seed: int
) -> None:
    """The gradients agree likewise: of op and twin, and of both gathers."""
    shape = fitting(kernels, shape)
    c = draw(shape, seed=seed)
    g = torch.Generator().manual_seed(seed)
    block = torch.randint(0, num_blocks, c.ids.shape, generator=g)
    masks = [(block == b).double() for b in range(num_blocks)]
    x = torch.randn(shape.tokens, num_blocks * shape.width, generator=g, dtype=torch.float64)

    def masked_sum(table: Tensor, ids: Tensor, coef: Tensor) -> Tensor:
        return torch.cat([naive_sum.gather_sum(table, ids, coef * mask.unsqueeze(2)) for mask in masks], dim=1)

    def masked_dot(table: Tensor, ids: Tensor, x: Tensor) -> Tensor:
        parts = zip(masks, x.chunk(num_blocks, dim=1), strict=True)
        return torch.stack([mask.unsqueeze(2) * naive_dot.gather_dot(table, ids, part) for mask, part in parts]).sum(0)

    of_sum, of_dot = {"bins": block, "num_bins": num_blocks}, {"bins": block}
    for gathers, named, masked, other, grad in (
        ((kernels.gather_sum, naive_sum.gather_sum), of_sum, masked_sum, c.coef, x),
        ((kernels.gather_dot, naive_dot.gather_dot), of_dot, masked_dot, x, c.grad_dot),
    ):
        expected = with_grads(masked, c.table, c.ids, other, grad)
        for gather in gathers:
            of_blocks = partial(gather, **named)
            for actual, reference in zip(with_grads(of_blocks, c.table, c.ids, other, grad), expected, strict=True):
                assert_close(actual, reference, torch.float64)


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


def test_gather_sum_is_what_its_docstring_says(kernels: Kernels) -> None:
    table = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
    ids = torch.tensor([[0, 1], [1, 1]])
    coef = torch.tensor([[[1.0, 2.0], [0.5, -1.0]], [[1.0, 0.0], [1.0, 3.0]]])
    for gather in (kernels.gather_sum, naive_sum.gather_sum):
        assert gather(table, ids, coef).tolist() == [[6.0, 12.0, -24.0, -32.0], [20.0, 40.0, 90.0, 120.0]]


def test_gather_dot_is_what_its_docstring_says(kernels: Kernels) -> None:
    table = torch.tensor([[1.0, 2.0], [10.0, 20.0], [3.0, -1.0]])
    ids = torch.tensor([[0, 1], [2, 2]])
    x = torch.tensor([[1.0, 1.0], [2.0, 5.0]])
    for gather in (kernels.gather_dot, naive_dot.gather_dot):
        assert gather(table, ids, x).tolist() == [[[3.0], [30.0]], [[1.0], [1.0]]]
        assert gather(table, ids, x, 2).tolist() == [[[1.0, 2.0], [10.0, 20.0]], [[6.0, -5.0], [6.0, -5.0]]]


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[5]], ids=str)
def test_gradcheck(kernels: Kernels, shape: Shape) -> None:
    c = draw(shape)
    table = c.table.requires_grad_()
    # Along a random direction, where the slow mode moves every element by itself: twins have every gradient.
    check = partial(torch.autograd.gradcheck, fast_mode=True)
    assert check(lambda t, a: kernels.gather_sum(t, c.ids, a), (table, c.coef.requires_grad_()))
    assert check(lambda t, a: kernels.gather_dot(t, c.ids, a), (table, c.x.requires_grad_()))


def test_gradients_that_nobody_asked_for_are_not_made(kernels: Kernels) -> None:
    c = draw(SHAPES[1])
    for gather, other in ((kernels.gather_sum, c.coef), (kernels.gather_dot, c.x)):
        for table_wants, other_wants in ((True, False), (False, True)):
            table = c.table.clone().requires_grad_(table_wants)
            leaf = other.clone().requires_grad_(other_wants)
            gather(table, c.ids, leaf).sum().backward()
            assert (table.grad is not None, leaf.grad is not None) == (table_wants, other_wants)


def test_strides_do_not_matter(kernels: Kernels) -> None:
    c = draw(Shape(rows=9, tokens=5, reads=4, groups=2, width=6))
    ids = c.ids.t().contiguous().t()
    coef = c.coef.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    x = c.x.t().contiguous().t()
    assert not ids.is_contiguous()
    assert not coef.is_contiguous()
    assert not x.is_contiguous()
    for strided, plain in zip(
        (
            *with_grads(kernels.gather_sum, c.table, ids, coef, c.grad_sum.t().contiguous().t()),
            *with_grads(kernels.gather_dot, c.table, ids, x, c.grad_dot.mT.contiguous().mT),
        ),
        (
            *with_grads(kernels.gather_sum, c.table, c.ids, c.coef, c.grad_sum),
            *with_grads(kernels.gather_dot, c.table, c.ids, c.x, c.grad_dot),
        ),
        strict=True,
    ):
        torch.testing.assert_close(strided, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_read_may_hold_anything(kernels: Kernels, dtype: torch.dtype) -> None:
    c = draw(Shape(rows=12, tokens=6, reads=3, groups=2, width=8), dtype)
    ids = c.ids % 6 * 2
    clean = c.table.clone()
    clean[1::2] = 0
    poisoned = c.table.clone()
    poisoned[1::2] = float("nan")
    for gather, other, grad in ((kernels.gather_sum, c.coef, c.grad_sum), (kernels.gather_dot, c.x, c.grad_dot)):
        for actual, reference in zip(
            with_grads(gather, poisoned, ids, other, grad), with_grads(gather, clean, ids, other, grad), strict=True
        ):
            assert torch.equal(actual, reference)


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
    c = draw(fitting(kernels, shape), dtype)
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


@pytest.mark.parametrize("accumulator_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_segment_accumulate_equals_its_twin(
    kernels: Kernels, shape: Shape, dtype: torch.dtype, accumulator_dtype: torch.dtype
) -> None:
    """To the bit; Triton for rows that are read no more often than its blocks are long, as all are here."""
    c = draw(fitting(kernels, shape), dtype)
    start = torch.randn(shape.rows, shape.width, generator=torch.Generator().manual_seed(1)).to(accumulator_dtype)
    actual, reference = start.clone(), start.clone()
    kernels.segment_accumulate(actual, c.ids, c.coef, c.x)
    naive_accumulate.segment_accumulate(reference, c.ids, c.coef, c.x)
    assert torch.equal(actual, reference)
    assert not torch.equal(actual, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bf16_accumulator_is_rounded_as_its_twin_is(kernels: Kernels, shape: Shape, dtype: torch.dtype) -> None:
    """To the bit, as one of the two numbers beside the sum in fp32."""
    c = draw(fitting(kernels, shape), dtype)
    start = torch.randn(shape.rows, shape.width, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounding = Rounding(2**62 + 5, first_row=7, first_column=3)
    actual, reference, sums = start.clone(), start.clone(), start.float()
    kernels.segment_accumulate(actual, c.ids, c.coef, c.x, rounding=rounding)
    naive_accumulate.segment_accumulate(reference, c.ids, c.coef, c.x, rounding=rounding)
    naive_accumulate.segment_accumulate(sums, c.ids, c.coef, c.x)
    assert torch.equal(actual, reference)
    assert actual.numel() < 1000 or not torch.equal(actual, sums.bfloat16())
    assert ((actual - sums).abs() < 2**-7 * sums.abs()).all()


def test_small_terms_are_not_lost_beside_large_ones(kernels: Kernels) -> None:
    """Numbers beside 256 are 2 apart: a quarter goes up with the probability 1/8, by rows that are added to again and
    again. The mean of n elements after k additions is 256 + k / 4, to 2 sqrt(k / n) sqrt(1/8 (1 - 1/8)) at one sigma."""
    num_rows, width, times = 12, 40, 6
    accumulator = torch.full((num_rows, width), 256.0, dtype=torch.bfloat16)
    ids, ones = torch.arange(num_rows).view(num_rows, 1), torch.ones(num_rows, 1, 1)
    for time in range(times):
        quarter = torch.full((num_rows, width), 0.25)
        kernels.segment_accumulate(accumulator, ids, ones, quarter, rounding=Rounding(1000 + 256 * time))
    off = float(accumulator.double().mean()) - 256 - times / 4
    assert abs(off) < 5 * 2 * (times / (num_rows * width) * 7 / 64) ** 0.5
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


def main_grad_table(values: Tensor) -> torch.nn.Parameter:
    """A parameter as Megatron's DDP leaves it: an fp32 main_grad, and the mark that the gradient is still to come."""
    table = torch.nn.Parameter(values.clone())
    table.main_grad = torch.zeros(values.shape, dtype=torch.float32)  # type: ignore[attr-defined]
    table.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_table_gradient_goes_to_main_grad(kernels: Kernels, shape: Shape, dtype: torch.dtype) -> None:
    """Two uses of one table in one graph, two backward passes: everything adds up in fp32, nothing dense is left in
    `grad`.
    """
    c = draw(fitting(kernels, shape), dtype)
    table = main_grad_table(c.table)
    reference = c.table.double().requires_grad_()
    for _ in range(2):
        (kernels.gather_sum(table, c.ids, c.coef) * c.grad_sum).sum().add(
            (kernels.gather_dot(table, c.ids.flip(1), c.x) * c.grad_dot).sum()
        ).backward()
        coef, x, grad_sum, grad_dot = wide(c.coef, c.x, c.grad_sum, c.grad_dot)
        (naive_sum.gather_sum(reference, c.ids, coef) * grad_sum).sum().add(
            (naive_dot.gather_dot(reference, c.ids.flip(1), x) * grad_dot).sum()
        ).backward()
    assert reference.grad is not None
    # The products are exact in fp32 for bf16 inputs: the sum is as good as fp32's, whatever the table's dtype.
    assert_close(table.main_grad, reference.grad, torch.float32)
    assert table.grad_added_to_main_grad is True
    assert table.grad is not None
    assert table.grad.is_sparse
    assert table.grad._nnz() == 0


def test_gradient_of_the_other_input_is_the_same_with_main_grad(kernels: Kernels) -> None:
    c = draw(SHAPES[1], torch.float32)
    for gather, other, grad in ((kernels.gather_sum, c.coef, c.grad_sum), (kernels.gather_dot, c.x, c.grad_dot)):
        _, _, plain = with_grads(gather, c.table, c.ids, other, grad)
        leaf = other.clone().requires_grad_()
        gather(main_grad_table(c.table), c.ids, leaf).backward(grad)
        assert torch.equal(leaf.grad, plain)  # type: ignore[arg-type]


def test_backward_hooks_of_the_table_still_fire(kernels: Kernels) -> None:
    """Megatron's DDP counts on them to know that a gradient is ready."""
    c = draw(SHAPES[0], torch.float32)
    table = main_grad_table(c.table)
    ready: list[bool] = []
    table.register_post_accumulate_grad_hook(lambda p: ready.append(p.grad_added_to_main_grad))
    kernels.gather_sum(table, c.ids, c.coef).sum().backward()
    assert ready == [True]


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


def test_every_row_at_once_adds_up(kernels: Kernels) -> None:
    """All tokens on one row: the longest run that a segment can have."""
    reads, width = 16, 32
    shape = fitting(kernels, Shape(rows=3, tokens=64, reads=reads, groups=2, width=width))
    tokens = shape.tokens
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
    if kernels.implementations["segment_accumulate"] == "triton":
        monkeypatch.setattr("kernels.segment_accumulate.triton_op.BLOCK", block)
    for rows, seed in ((1, 0), (2, 1), (5, 2), (40, 3)):
        c = draw(Shape(rows=rows, tokens=11, reads=9, groups=1, width=8), seed=seed)
        ids = c.ids.clone()
        ids[2:7] = rows // 2
        actual, reference = torch.zeros_like(c.table), torch.zeros_like(c.table)
        kernels.segment_accumulate(actual, ids, c.coef, c.x)
        naive_accumulate.segment_accumulate(reference, ids, c.coef, c.x)
        assert_close(actual, reference, torch.float64)


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


def test_bf16_sums_are_fp32_sums(kernels: Kernels) -> None:
    """256 equal terms: bf16 would stop growing at 256 ulps."""
    table = torch.ones(1, 8, dtype=torch.bfloat16)
    ids = torch.zeros(1, 512, dtype=torch.int64)
    coef = torch.full((1, 512, 1), 0.5, dtype=torch.bfloat16)
    assert kernels.gather_sum(table, ids, coef).tolist() == [[256.0] * 8]


def sorts_from_now_on(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by a number of rows with every sort of entries; skips where none are sorted."""
    name = kernels.implementations["segment_accumulate"]
    if name == "torch":
        pytest.skip("PyTorch's index_add_ sorts nothing")
    function = "triton_op.sort_by_row" if name == "triton" else "op._bucket_order"
    target = f"kernels.segment_accumulate.{function}"
    module, attribute = target.rsplit(".", 1)
    original = getattr(importlib.import_module(module), attribute)
    calls: list[int] = []

    def counted(ids: Tensor, num_rows: int) -> tuple[Tensor, ...]:
        calls.append(num_rows)
        return original(ids, num_rows)

    monkeypatch.setattr(target, counted)
    return calls


def test_values_and_pre_values_share_one_sort(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = sorts_from_now_on(kernels, monkeypatch)
    c = draw(SHAPES[1], torch.float32)
    values, pre_values, ids = main_grad_table(c.table), main_grad_table(c.table), c.ids.clone()
    kernels.gather_sum(values, ids, kernels.gather_dot(pre_values, ids, c.x).expand(-1, -1, 2)).sum().backward()
    assert len(calls) == 1
    # Ids that were written to are sorted again.
    first = values.main_grad.clone()
    ids.fill_(0)
    kernels.gather_sum(values, ids, c.coef).sum().backward()
    assert len(calls) == 2
    assert torch.equal(values.main_grad[1:], first[1:])


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_torch_compile_takes_the_gathers_whole(kernels: Kernels, num_blocks: int) -> None:
    """Forward and backward in one graph each."""
    c = draw(SHAPES[1], torch.float32)
    block = c.ids % num_blocks if num_blocks > 1 else None
    x = c.x.repeat(1, num_blocks)

    def read(table: Tensor, coef: Tensor, x: Tensor) -> Tensor:
        products = kernels.gather_dot(table, c.ids, x, 1, block)
        return kernels.gather_sum(table, c.ids, coef * products, block, num_blocks)

    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    results = []
    for function in (read, compiled):
        leaves = [t.clone().requires_grad_() for t in (c.table, c.coef, x)]
        out = function(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


def test_strided_tables_are_refused(kernels: Kernels) -> None:
    if kernels.implementations["gather_sum"] == "torch":
        pytest.skip("PyTorch's operations take any strides")
    c = draw(SHAPES[1])
    with pytest.raises(ValueError, match="need contiguous rows"):
        kernels.gather_sum(c.table.t().contiguous().t(), c.ids, c.coef)


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

    one = run()
    try:
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            assert all(torch.equal(a, b) for a, b in zip(run(), one, strict=True))
    finally:
        torch.set_num_threads(1)
