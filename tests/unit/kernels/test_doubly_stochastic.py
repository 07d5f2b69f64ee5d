"""Sinkhorn's steps and their gradient, of every implementation against the twin's in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.common.tiles import matrices_tile
from kernels.doubly_stochastic import naive
from kernels.implementations import unavailable
from kernels.select import Kernels
from tests.small_chunks import OF_STEPS, small

needs_triton = pytest.mark.skipif(bool(unavailable("triton", "cpu")), reason=str(unavailable("triton", "cpu")))
# As shipped, with a last tile that is not full; sides that are padded; one number; none; one matrix.
SHAPES = ((3, 3, 4, 4), (14, 3, 3), (5, 1, 5, 5), (34, 2, 2), (3, 1, 1), (0, 2, 4, 4), (8, 8))
TOLERANCE = {torch.float32: 2e-6, torch.float64: 2e-14}


def draw(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def outcome(function: Callable[..., Tensor], logits: Tensor, iterations: int, epsilon: float) -> list[Tensor]:
    leaf = logits.detach().requires_grad_()
    out = function(leaf, iterations, epsilon)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaf, upstream)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matrices_and_gradients_are_the_twins(kernels: Kernels, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = draw(shape, dtype)
    for iterations, epsilon in ((1, 2.0**-20), (2, 0.25), (20, 2.0**-20)):
        expected = outcome(naive.doubly_stochastic, logits.double(), iterations, epsilon)
        with small(OF_STEPS):
            found = outcome(kernels.doubly_stochastic, logits, iterations, epsilon)
            with torch.no_grad():
                assert torch.equal(kernels.doubly_stochastic(logits, iterations, epsilon), found[0])
        for ours, reference in zip(found, expected, strict=True):
            assert (ours.shape, ours.dtype, ours.is_contiguous()) == (reference.shape, dtype, True)
            torch.testing.assert_close(ours.double(), reference, rtol=0, atol=TOLERANCE[dtype])


def test_steps_back_from_the_last_matrix_stay_close_to_those_that_were_taken(kernels: Kernels) -> None:
    """Backward has every step's matrix by multiplication, from the last one on: its error in fp32 is that of a gradient
    through matrices that were kept, whether they are nearly uniform or nearly permutations."""
    for scale in (0.1, 1.0, 8.0):
        logits = draw((64, 4, 4), torch.float32, scale)
        exact = outcome(naive.doubly_stochastic, logits.double(), 20, 1e-6)[1]
        largest = float(exact.abs().max())
        kept, ours = (
            float((outcome(function, logits, 20, 1e-6)[1].double() - exact).abs().max()) / largest
            for function in (naive.doubly_stochastic, kernels.doubly_stochastic)
        )
        assert ours <= max(2 * kept, 1e-6), (scale, ours, kept)


def test_many_steps_end_doubly_stochastic(kernels: Kernels) -> None:
    mix = kernels.doubly_stochastic(draw((3, 2, 4, 4), torch.float64), 200, 1e-12)
    for side in (-1, -2):
        torch.testing.assert_close(mix.sum(side), torch.ones(3, 2, 4, dtype=torch.float64))


def test_logits_far_from_zero_overflow_nothing(kernels: Kernels) -> None:
    logits = torch.tensor([[-1e4, 1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, 1e4]])
    expected = outcome(naive.doubly_stochastic, logits.double(), 20, 2.0**-20)
    for ours, reference in zip(outcome(kernels.doubly_stochastic, logits, 20, 2.0**-20), expected, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=0, atol=4e-6)


def test_the_gradient_is_that_of_differences_and_keeps_the_logits_alone(kernels: Kernels) -> None:
    logits = draw((3, 2, 3, 3), torch.float64).requires_grad_()
    # Along a random direction, where the slow mode moves every element by itself: the twin has every gradient.
    assert torch.autograd.gradcheck(lambda x: kernels.doubly_stochastic(x, 3, 0.125), logits, fast_mode=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kernels.doubly_stochastic(logits, 20, 1e-6)
    assert [tensor.data_ptr() for tensor in kept] == [logits.data_ptr()]


def test_strides_change_nothing_and_a_second_run_has_the_same_bits(kernels: Kernels) -> None:
    logits = draw((5, 3, 4, 4), torch.float32)
    expected = outcome(kernels.doubly_stochastic, logits, 4, 1e-6)
    turned = logits.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    of_product = torch.cat((logits, logits), 3)[..., 4:]
    for other in (logits, turned, of_product):
        found = outcome(kernels.doubly_stochastic, other, 4, 1e-6)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    leaf = logits.clone().requires_grad_()
    upstream = torch.randn(4, 4, 3, 5, generator=torch.Generator().manual_seed(7)).permute(3, 2, 0, 1)
    out = kernels.doubly_stochastic(leaf, 4, 1e-6)
    by_stride, plain = (
        torch.autograd.grad(out, leaf, each, retain_graph=True)[0] for each in (upstream, upstream.contiguous())
    )
    assert torch.equal(by_stride, plain)


def test_a_matrix_that_is_not_finite_stays_alone(kernels: Kernels) -> None:
    logits = draw((5, 3, 3), torch.float32)
    expected = outcome(kernels.doubly_stochastic, logits, 3, 1e-6)
    logits[2] = torch.nan
    for ours, reference in zip(outcome(kernels.doubly_stochastic, logits, 3, 1e-6), expected, strict=True):
        others = [0, 1, 3, 4]
        assert torch.equal(ours[others], reference[others])
        assert bool(ours[2].isnan().all())


@needs_triton
def test_the_operator_is_what_tracing_is_told() -> None:
    from kernels.doubly_stochastic import triton_op

    logits = draw((6, 3, 3), torch.float32)
    torch.library.opcheck(triton_op._doubly_stochastic, (logits, 2, 1e-6))
    torch.library.opcheck(triton_op._gradient, (logits, logits, 2, 1e-6))


def test_a_tile_covers_a_matrix() -> None:
    for n in range(1, 9):
        tile = matrices_tile(n)
        assert n <= tile.side <= 2 * n
        assert tile.matrices * tile.side**2 == tile.num_warps * 32 * 4
