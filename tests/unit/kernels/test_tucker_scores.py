"""The scores of kept entries, and their gradients, of every implementation against the twin's in fp64.

Legend: T tokens, H heads, N keys per side, R Tucker rank, C cores, K kept entries per token and head.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.implementations import Implementation, unavailable
from kernels.parity import TOLERANCE
from kernels.select import implementation_of, select_kernels
from kernels.tucker_scores import naive, op

IMPLEMENTATIONS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(unavailable(name, "cpu")), reason=str(unavailable(name, "cpu"))))
    for name in ("torch", "cpu", "triton")
]
# T, H, N, R, C, K: as shipped; more lists than one part of the cores' gradients holds, all entries the same; tails; one
# entry; no token.
SHAPES = [(6, 2, 33, 2, 2, 20), (70, 2, 1, 2, 1, 5), (9, 2, 9, 3, 3, 33), (3, 1, 4, 1, 1, 1), (0, 1, 5, 2, 2, 3)]
# Axes of the scores [2, T, H, N, R] in memory, outermost first: as products give them by rank and by head, and contiguous.
LAYOUTS = [(0, 4, 1, 2, 3), (0, 2, 1, 3, 4), (0, 1, 2, 3, 4)]


def draw(shape: tuple[int, ...], layout: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, keys, rank, cores, kept = shape
    g = torch.Generator().manual_seed(5)
    logical = (2, tokens, heads, keys, rank)
    scores = torch.randn(*(logical[axis] for axis in layout), generator=g, dtype=dtype)
    scores = scores.permute(*(layout.index(axis) for axis in range(5)))
    entries = torch.randint(0, keys, (2, tokens, heads, kept), generator=g)
    return scores, torch.randn(cores, heads, rank, rank, generator=g, dtype=dtype), entries


def outcome(function: object, scores: Tensor, cores: Tensor, entries: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (scores, cores)]
    out = function(*leaves, entries)  # type: ignore[operator]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype))]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_scores_and_gradients_are_the_twins(
    implementation: Implementation, shape: tuple[int, ...], layout: tuple[int, ...]
) -> None:
    function = implementation_of("tucker_scores", implementation)
    for dtype, tolerance in ((torch.float32, TOLERANCE[torch.float32]), (torch.float64, 1e-14)):
        if implementation == "triton":
            # Its interpreter takes a millisecond per program; nine tokens of 33 entries are two tiles, on one layout and in
            # one dtype, as places of scores follow from the token, whatever its tile.
            shape = (min(shape[0], 9 if (layout, dtype) == (LAYOUTS[0], torch.float32) else 2), *shape[1:])
        scores, cores, entries = draw(shape, layout, dtype)
        expected = outcome(naive.tucker_scores, scores.double(), cores.double(), entries)
        for found, reference in zip(outcome(function, scores, cores, entries), expected, strict=True):
            assert (found.shape, found.dtype) == (reference.shape, dtype)
            largest = float(reference.abs().max()) if reference.numel() else 0.0
            torch.testing.assert_close(found.double(), reference, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_not_kept_is_not_read(implementation: Implementation) -> None:
    scores, cores, entries = draw(SHAPES[0], LAYOUTS[0], torch.float32)
    kept = torch.zeros(scores.shape[:4], dtype=torch.bool).scatter_(3, entries, True)
    poisoned = scores.masked_fill(~kept.unsqueeze(4), float("nan"))
    function = implementation_of("tucker_scores", implementation)
    found, clean = (outcome(function, each, cores, entries) for each in (poisoned, scores))
    assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
def test_bits_do_not_depend_on_the_number_of_threads(implementation: Implementation) -> None:
    function = implementation_of("tucker_scores", implementation)
    operands = draw((130, 2, 33, 2, 2, 20), LAYOUTS[0], torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(outcome(function, *operands))
    finally:
        torch.set_num_threads(before)
    if implementation == "torch":
        # PyTorch's product may sum the cores' gradients by threads.
        results = [found[:2] for found in results]
    assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))


@pytest.mark.skipif(bool(unavailable("triton", "cpu")), reason=str(unavailable("triton", "cpu")))
def test_scores_in_bf16_whose_rows_have_gaps_are_taken_and_given() -> None:
    """As aligned products hand them on: widened where they are kept, and a gradient in their dtype and place."""
    shape, layout = SHAPES[0], LAYOUTS[0]
    drawn, cores, entries = draw(shape, layout, torch.float32)
    made = drawn.permute(layout).bfloat16()
    wide = torch.zeros(*made.shape[:-1], made.shape[-1] + 7, dtype=made.dtype)[..., : made.shape[-1]].copy_(made)
    scores = wide.permute(*(layout.index(axis) for axis in range(5))).requires_grad_()
    twin = scores.detach().double().requires_grad_()
    weight = torch.randn(*entries.shape[1:], cores.shape[0], generator=torch.Generator().manual_seed(8))
    out = implementation_of("tucker_scores", "triton")(scores, cores, entries)
    expected = naive.tucker_scores(twin, cores.double(), entries)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad(out, scores, weight)
    (reference,) = torch.autograd.grad(expected, twin, weight.double())
    assert (found.dtype, found.stride()) == (torch.bfloat16, scores.stride())
    torch.testing.assert_close(found.double(), reference, rtol=TOLERANCE[torch.bfloat16], atol=1e-6)


@pytest.mark.skipif(bool(unavailable("cpu", "cpu")), reason=str(unavailable("cpu", "cpu")))
def test_the_gradient_lies_in_memory_as_the_scores_do() -> None:
    """Nothing turns it around on its way back to the products."""
    scores, cores, entries = draw(SHAPES[0], LAYOUTS[0], torch.float32)
    scores.requires_grad_()
    out = select_kernels("cpu", device_type="cpu").tucker_scores(scores, cores, entries)
    (gradient,) = torch.autograd.grad(out.sum(), scores)
    assert gradient.stride() == scores.stride()


@pytest.mark.skipif(bool(unavailable("cpu", "cpu")), reason=str(unavailable("cpu", "cpu")))
def test_the_operator_is_what_tracing_is_told() -> None:
    for layout in LAYOUTS:
        scores, cores, entries = draw(SHAPES[0], layout, torch.float32)
        torch.library.opcheck(op._scores, (scores, cores, entries))
        torch.library.opcheck(op._gradients, (scores, cores, entries, op._scores(scores, cores, entries)))
