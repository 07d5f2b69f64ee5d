"""Inputs of the kernels that read and write rows, and how close to their naive twins results have to be.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.select import Kernels

# Largest error over the largest element of the reference, which is computed from the same inputs in float64.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)

TRACED = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="Dynamo of torch 2.11 gives wrong gradients of functions whose forward ends with an operation in place",
)

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

shapes = st.builds(
    lambda rows, tokens, reads, groups, per_group: Shape(rows, tokens, reads, groups, groups * per_group),
    st.integers(1, 9),
    st.integers(0, 6),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 5),
)


class Case(NamedTuple):
    table: Tensor
    ids: Tensor
    coef: Tensor
    x: Tensor
    grad_sum: Tensor
    grad_dot: Tensor


def fitting(kernels: Kernels, shape: Shape) -> Shape:
    """The shape with two tokens for Triton's interpreter, which takes 20 ms per entry, as its kernels make no chunks of
    tokens; with nine reads at most, more than are under way at once and no power of two; and with 11 columns per group at
    most, which are two of a test's tiles (`tests.small_chunks.TILES`).
    """
    if not is_interpreted(kernels):
        return shape
    tokens, reads, width = min(shape.tokens, 2), min(shape.reads, 9), min(shape.width, 11 * shape.groups)
    return replace(shape, tokens=tokens, reads=reads, width=width)


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


def assert_same_with_any_threads(run: Callable[[], Sequence[Tensor]]) -> None:
    """Hold what one thread gives to what several do, bit for bit; tests have one, before and after."""
    one = run()
    try:
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            assert all(torch.equal(a, b) for a, b in zip(run(), one, strict=True))
    finally:
        torch.set_num_threads(1)


def main_grad_table(values: Tensor) -> torch.nn.Parameter:
    """A parameter as Megatron's DDP leaves it: an fp32 main_grad, and the mark that the gradient is still to come."""
    table = torch.nn.Parameter(values.clone())
    table.main_grad = torch.zeros(values.shape, dtype=torch.float32)  # type: ignore[attr-defined]
    table.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return table
