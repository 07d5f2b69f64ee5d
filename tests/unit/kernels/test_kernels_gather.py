"""The gathers against their naive twins: forward and every gradient, in every implementation.

Triton's kernels run in its interpreter where there is no GPU (`conftest.py`); `tests/gpu` runs the same
comparisons on one.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.gather_dot import naive as naive_dot
from kernels.gather_sum import naive as naive_sum
from kernels.select import Kernels
from tests.rotation import in_rotation
from tests.unit.kernels.cases import (
    DTYPES,
    SHAPES,
    TRACED,
    Shape,
    assert_close,
    draw,
    fitting,
    shapes,
    wide,
    with_grads,
)


@pytest.mark.parametrize(
    ("shape", "dtype"), in_rotation([(shape, dtype) for shape in SHAPES for dtype in DTYPES]), ids=str
)
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


def test_bf16_sums_are_fp32_sums(kernels: Kernels) -> None:
    """256 equal terms: bf16 would stop growing at 256 ulps."""
    table = torch.ones(1, 8, dtype=torch.bfloat16)
    ids = torch.zeros(1, 512, dtype=torch.int64)
    coef = torch.full((1, 512, 1), 0.5, dtype=torch.bfloat16)
    assert kernels.gather_sum(table, ids, coef).tolist() == [[256.0] * 8]


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[5]], ids=str)
def test_gradcheck(kernels: Kernels, shape: Shape) -> None:
    c = draw(fitting(kernels, shape))
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
    c = draw(fitting(kernels, Shape(rows=9, tokens=5, reads=4, groups=2, width=6)))
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


def test_strided_tables_are_refused(kernels: Kernels) -> None:
    if kernels.implementations["gather_sum"] == "torch":
        pytest.skip("PyTorch's operations take any strides")
    c = draw(SHAPES[1])
    with pytest.raises(ValueError, match="need contiguous rows"):
        kernels.gather_sum(c.table.t().contiguous().t(), c.ids, c.coef)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_read_may_hold_anything(kernels: Kernels, dtype: torch.dtype) -> None:
    c = draw(fitting(kernels, Shape(rows=12, tokens=6, reads=3, groups=2, width=8)), dtype)
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


@TRACED
def test_torch_compile_takes_the_gathers_whole(kernels: Kernels) -> None:
    """Forward and backward in one graph each, of entries in one block and in three."""
    c = draw(SHAPES[1], torch.float32)
    block, x = c.ids % 3, c.x.repeat(1, 3)

    def read(table: Tensor, coef: Tensor, x: Tensor) -> Tensor:
        of_one = kernels.gather_dot(table, c.ids, x[:, : table.shape[1]], 1, None)
        sums = kernels.gather_sum(table, c.ids, coef * of_one, None, 1)
        of_three = kernels.gather_dot(table, c.ids, x, 1, block)
        return torch.cat((sums, kernels.gather_sum(table, c.ids, coef * of_three, block, 3)), 1)

    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    results = []
    for function in (read, compiled):
        leaves = [t.clone().requires_grad_() for t in (c.table, c.coef, x)]
        out = function(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)
