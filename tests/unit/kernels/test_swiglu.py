"""SwiGLU and its gradient, of every implementation against the twin's in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.parity import TOLERANCE
from kernels.select import Kernels, implementation_of

SHAPES = [(5, 3, 2 * 7), (1, 2 * 1), (2, 2 * 1030), (33, 2 * 240), (0, 2 * 8)]
"""Odd widths, wider than a tile, several rows to a tile, and none."""


def outcome(function: object, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    out = function(x)  # type: ignore[operator]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, x, weight.to(out.dtype))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_and_its_gradient_are_the_twins(
    kernels: Kernels, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = outcome(implementation_of("swiglu", "naive"), x.double())
    for found, reference in zip(outcome(kernels.swiglu, x), expected, strict=True):
        assert (found.shape, found.dtype) == (reference.shape, dtype)
        if not reference.numel():
            continue
        # PyTorch rounds silu(gate), Triton nothing but the result.
        error = float((found.double() - reference).abs().max() / reference.abs().max())
        assert error <= 2 * TOLERANCE[dtype]


def test_gates_far_from_zero_overflow_nothing(kernels: Kernels) -> None:
    gates = torch.tensor([-1e4, -100.0, 100.0, 1e4])
    x = torch.cat((gates, torch.ones(4))).unsqueeze(0)
    out, gradient = outcome(kernels.swiglu, x)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 100.0, 1e4]]))
    assert bool(gradient.isfinite().all())


def test_a_gradient_that_lies_elsewhere_in_memory_is_taken(kernels: Kernels) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    (by_stride,) = torch.autograd.grad(kernels.swiglu(x), x, weight.t())
    (plain,) = torch.autograd.grad(kernels.swiglu(x), x, weight.t().contiguous())
    assert torch.equal(by_stride, plain)
