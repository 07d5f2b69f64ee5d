"""Products of maps with what is normalised, and their gradients, of every implementation against the twin's in fp64.

Legend: T tokens, K columns, M outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.common.tiles import MAX_PRODUCT_OUTPUTS, product_gradients_tile, product_splits, product_tile
from kernels.implementations import unavailable
from kernels.normal_product import naive
from kernels.parity import TOLERANCE, stream_problems
from kernels.select import Kernels, select_kernels

needs_triton = pytest.mark.skipif(bool(unavailable("triton", "cpu")), reason=str(unavailable("triton", "cpu")))
# Tokens, K and M: two splits of the columns; odd columns; one token; many outputs, and more than a program has; none; several
# tiles of tokens, the last of which is not full.
SHAPES = (
    ((3, 2), 96, 24),
    ((5,), 77, 15),
    ((1,), 8, 3),
    ((2, 1), 130, 48),
    ((2,), 40, 80),
    ((0, 2), 32, 8),
    ((150,), 70, 6),
)
# Sums of a thousand terms in fp64.
ERRORS = {**TOLERANCE, torch.float64: 1e-13}
EPSILON = 1e-2
CENTRED = pytest.mark.parametrize("centred", [False, True], ids=["as it is", "centred"])


def draw(tokens: tuple[int, ...], columns: int, outputs: int, dtype: torch.dtype, mean: float = 0.5) -> list[Tensor]:
    """x and W."""
    generator = torch.Generator().manual_seed(5)
    x = mean + torch.randn(*tokens, columns, generator=generator, dtype=torch.float64)
    weight = torch.randn(outputs, columns, generator=generator, dtype=torch.float64)
    return [x.to(dtype), weight.to(torch.promote_types(dtype, torch.float32))]


def outcome(
    function: Callable[..., Tensor], operands: Sequence[Tensor], centred: bool, wanted: Sequence[bool] = (True, True)
) -> list[Tensor]:
    """Result, and the gradients that are wanted."""
    leaves = [each.detach().requires_grad_(wants) for each, wants in zip(operands, wanted, strict=True)]
    out = function(*leaves, EPSILON, centred)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, asked, upstream.to(out.dtype))]


def errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Largest errors over the largest elements."""
    return [
        float((ours.double() - reference).abs().max() / reference.abs().max().clamp_min(1e-3))
        if reference.numel()
        else 0.0
        for ours, reference in zip(found, expected, strict=True)
    ]


@CENTRED
@pytest.mark.parametrize("dtype", list(ERRORS), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_gradients_are_the_twins(
    kernels: Kernels, shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype, centred: bool
) -> None:
    operands = draw(*shape, dtype)
    expected = outcome(naive.normal_product, [each.double() for each in operands], centred)
    found = outcome(kernels.normal_product, operands, centred)
    with torch.no_grad():
        assert torch.equal(kernels.normal_product(*operands, EPSILON, centred), found[0])
    for ours, reference, narrow in zip(found, expected, (operands[1], *operands), strict=True):
        assert (ours.shape, ours.dtype) == (reference.shape, narrow.dtype)
    for error, ours in zip(errors(found, expected), found, strict=True):
        assert error <= ERRORS[ours.dtype]


@CENTRED
def test_gradients_that_are_wanted_have_the_same_bits_whichever_they_are(kernels: Kernels, centred: bool) -> None:
    operands = draw((3, 2), 70, 8, torch.bfloat16)
    out, *gradients = outcome(kernels.normal_product, operands, centred)
    for wanted in ((True, False), (False, True)):
        expected = [out, *itertools.compress(gradients, wanted)]
        found = outcome(kernels.normal_product, operands, centred, wanted)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@CENTRED
def test_gradients_are_those_of_differences(kernels: Kernels, centred: bool) -> None:
    operands = [each.requires_grad_() for each in draw((2, 1), 9, 5, torch.float64)]
    assert torch.autograd.gradcheck(lambda *given: kernels.normal_product(*given, EPSILON, centred), operands)


@CENTRED
def test_strides_change_nothing_and_a_second_run_has_the_same_bits(kernels: Kernels, centred: bool) -> None:
    operands = draw((3, 2), 70, 8, torch.bfloat16)
    expected = outcome(kernels.normal_product, operands, centred)
    again = outcome(kernels.normal_product, operands, centred)
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    turned = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in operands]
    gaps = [torch.stack((each, each), -1)[..., 0] for each in operands]
    for others in (turned, gaps):
        # PyTorch's products add up in an order that strides decide.
        for ours, reference in zip(outcome(kernels.normal_product, others, centred), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=ERRORS[ours.dtype] * float(reference.abs().max()))


def test_a_gradient_without_strides_is_taken(kernels: Kernels) -> None:
    """A sum hands one number to all of its terms."""
    x, weight = (each.requires_grad_() for each in draw((3, 2), 70, 8, torch.float32))
    found = torch.autograd.grad(kernels.normal_product(x, weight, EPSILON).sum(), (x, weight))
    expected = torch.autograd.grad(naive.normal_product(x, weight, EPSILON).sum(), (x, weight))
    for ours, twins in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, twins)


@CENTRED
def test_backward_keeps_x_in_its_own_dtype_and_little_else(kernels: Kernels, centred: bool) -> None:
    x, weight = (each.requires_grad_() for each in draw((40,), 90, 3, torch.bfloat16))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        kernels.normal_product(x, weight, EPSILON, centred)
    (own,) = (each for each in kept if each.data_ptr() == x.data_ptr())
    assert own.dtype == torch.bfloat16
    # Products and two numbers of each token, beside the maps.
    assert sum(each.numel() for each in kept if each is not own) <= 40 * (3 + 2) + weight.numel()


@CENTRED
def test_a_token_that_is_not_finite_stays_alone(kernels: Kernels, centred: bool) -> None:
    operands = draw((4,), 70, 8, torch.float32)
    expected = outcome(kernels.normal_product, operands, centred)
    broken = [operands[0].clone(), operands[1]]
    broken[0][1] = torch.nan
    for ours, reference in zip(outcome(kernels.normal_product, broken, centred)[:2], expected[:2], strict=True):
        assert torch.equal(ours[[0, 2, 3]], reference[[0, 2, 3]])


@needs_triton
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_nothing_cancels_far_from_the_mean(dtype: torch.dtype) -> None:
    """Sums of x and of its squares would have lost three digits."""
    operands = draw((70,), 200, 6, dtype, mean=30.0)
    expected = outcome(naive.normal_product, [each.double() for each in operands], True)
    found = outcome(select_kernels("triton", device_type="cpu").normal_product, operands, True)
    for error, ours in zip(errors(found, expected), found, strict=True):
        assert error <= TOLERANCE[ours.dtype]


@needs_triton
@CENTRED
def test_the_operators_are_what_tracing_is_told(centred: bool) -> None:
    from kernels.normal_product import triton_op

    x, weight = draw((3, 2), 70, 8, torch.bfloat16)
    torch.library.opcheck(triton_op._normal_product, (x, weight, EPSILON, centred))
    results = triton_op._normal_product(x, weight, EPSILON, centred)
    for wanted in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(triton_op._gradients, (results[0], x, weight, *results, *wanted, centred))


def test_programs_fill_a_gpu() -> None:
    """Published widths with 8,192 tokens; three programs have room on each of 132 multiprocessors."""
    for n, hidden in itertools.product((2, 4), (2048, 2560, 4096, 7168)):
        for tile, size, steps in (
            (product_tile(n * n + 2 * n, narrow=True), 8192, n * hidden),
            (product_gradients_tile(n * n + 2 * n, narrow=True), n * hidden, 8192),
        ):
            across, along = (tile.rows, tile.columns) if size == 8192 else (tile.columns, tile.rows)
            num_tiles, num_steps = -(-size // across), -(-steps // along)
            splits = product_splits(num_tiles, num_steps)
            rounds = splits * num_tiles / 396
            assert rounds / -(-rounds // 1) >= 0.8
            assert num_steps // splits >= 8


def test_a_tile_has_room_for_all_outputs() -> None:
    for outputs, narrow in itertools.product(range(1, MAX_PRODUCT_OUTPUTS + 1), (False, True)):
        forward, backward = (tile(outputs, narrow=narrow) for tile in (product_tile, product_gradients_tile))
        assert outputs <= forward.side == backward.side <= MAX_PRODUCT_OUTPUTS
        # Four warps of Hopper multiply 64 rows at once.
        assert forward.rows == backward.columns == 64
    assert product_splits(0, 0) == product_splits(10_000, 1000) == 1


@CENTRED
def test_the_twin_is_the_formula_in_loops(centred: bool) -> None:
    x, weight = draw((2,), 5, 3, torch.float64)
    loops = torch.empty(2, 3, dtype=torch.float64)
    for token, values in enumerate(x.tolist()):
        mean = sum(values) / 5 if centred else 0.0
        root = (sum((value - mean) ** 2 for value in values) / 5 + EPSILON) ** 0.5
        for output, maps in enumerate(weight.tolist()):
            loops[token, output] = sum(w * (value - mean) / root for w, value in zip(maps, values, strict=True))
    torch.testing.assert_close(naive.normal_product(x, weight, EPSILON, centred), loops)


def test_products_with_other_maps_are_seen() -> None:
    good = select_kernels("torch")

    def flipped(x: Tensor, weight: Tensor, epsilon: float, /, centred: bool = False) -> Tensor:
        return good.normal_product(x, weight.flip(0), epsilon, centred)

    problems = list(stream_problems(replace(good, normal_product=flipped), "cpu", torch.float32))
    assert problems
    assert all(problem.startswith("normal_product") for problem in problems)
