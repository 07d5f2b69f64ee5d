"""Heads that are normalised and turned, and their gradients, of every implementation against the twin's in fp64.

Legend: s tokens of a sequence, b sequences, n query heads, g key heads, d columns of a head, of which the first r turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from kernels.common.tiles import heads_tile
from kernels.implementations import Implementation, unavailable
from kernels.rms_norm.op import torch_rms_norm
from kernels.rotated_heads import naive
from kernels.select import implementation_of
from megamem.attention.rotary import rotary_turns

IMPLEMENTATIONS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(unavailable(name, "cpu")), reason=str(unavailable(name, "cpu"))))
    for name in ("torch", "triton")
]
# PyTorch's rounds after the norm and by each operation.
TOLERANCE = {
    ("torch", torch.float32): 2e-6,
    ("triton", torch.float32): 2e-6,
    ("torch", torch.bfloat16): 2e-2,
    ("triton", torch.bfloat16): 8e-3,
}


@dataclass(frozen=True)
class Shape:
    """One comparison; `own_angles` where each sequence has its own."""

    s: int
    b: int
    n: int
    g: int
    d: int
    r: int
    own_angles: bool = False
    gains: bool = True


SHAPES = (
    # As shipped, with more tiles than programs do at once, and a last one that is not full.
    Shape(37, 2, 3, 3, 64, 64),
    # Grouped heads; angles of each sequence.
    Shape(5, 3, 6, 2, 16, 16, own_angles=True),
    # Widths that are no powers of two, and columns that do not turn.
    Shape(7, 2, 3, 1, 30, 20),
    Shape(7, 1, 2, 2, 24, 6, gains=False),
    # One token.
    Shape(1, 1, 2, 1, 8, 8),
    Shape(1, 2, 2, 2, 8, 4, own_angles=True, gains=False),
    Shape(0, 2, 2, 2, 8, 4),
)

Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def draw(shape: Shape, dtype: torch.dtype) -> Operands:
    """Heads as a split of a product's columns has them, turns, and gains."""
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    product = normal(shape.s, shape.b, (shape.n + 2 * shape.g) * shape.d)
    query, key, _ = product.split([shape.n * shape.d, shape.g * shape.d, shape.g * shape.d], 2)
    angles = torch.randn(shape.s, shape.b if shape.own_angles else 1, 1, shape.r // 2, generator=generator) * 10
    angles = torch.cat((angles, angles), 3)
    gains = (1 + normal(shape.d), 1 + normal(shape.d)) if shape.gains else (None, None)
    turns = torch.cat((angles.cos(), angles.sin()), 2)
    return query.unflatten(2, (shape.n, shape.d)), key.unflatten(2, (shape.g, shape.d)), turns, *gains


def outcome(function: Callable[..., tuple[Tensor, Tensor]], operands: Operands) -> list[Tensor]:
    """Turned heads, and gradients of heads and gains."""
    query, key, turns, *gains = operands
    given = [each.detach() for each in (query, key, *gains) if each is not None]
    leaves = [each.requires_grad_() for each in given]
    out = function(*leaves[:2], turns, *(leaves[2:] or (None, None)), 1e-2)
    generator = torch.Generator().manual_seed(4)
    upstream = [torch.randn(each.shape, generator=generator).bfloat16().to(each.dtype) for each in out]
    return [each.detach() for each in (*out, *torch.autograd.grad(out, leaves, upstream))]


def widened(operands: Operands) -> Operands:
    query, key, turns, query_gain, key_gain = operands
    return (
        query.double(),
        key.double(),
        turns,
        None if query_gain is None else query_gain.double(),
        None if key_gain is None else key_gain.double(),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_and_gradients_are_the_twins(implementation: Implementation, shape: Shape, dtype: torch.dtype) -> None:
    operands = draw(shape, dtype)
    expected = outcome(naive.rotated_heads, widened(operands))
    found = outcome(implementation_of("rotated_heads", implementation), operands)
    for ours, reference in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype) == (reference.shape, dtype)
        largest = float(reference.abs().max()) if reference.numel() else 0.0
        tolerance = TOLERANCE[implementation, dtype] * largest
        torch.testing.assert_close(ours.double(), reference, rtol=0, atol=tolerance)


@pytest.mark.skipif(bool(unavailable("triton", "cpu")), reason=str(unavailable("triton", "cpu")))
def test_programs_add_up_gains_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.common.tiles._GAIN_PROGRAMS", 3)
    for shape in SHAPES[:3]:
        operands = draw(shape, torch.float32)
        expected = outcome(naive.rotated_heads, widened(operands))
        for ours, reference in zip(
            outcome(implementation_of("rotated_heads", "triton"), operands), expected, strict=True
        ):
            torch.testing.assert_close(ours.double(), reference, rtol=0, atol=2e-6 * float(reference.abs().max()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp64_is_not_narrowed(implementation: Implementation) -> None:
    query, key, turns, *gains = draw(SHAPES[2], torch.float64)
    operands = query, key, turns.double(), *gains
    expected = outcome(naive.rotated_heads, operands)
    for ours, reference in zip(
        outcome(implementation_of("rotated_heads", implementation), operands), expected, strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-13 * float(reference.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pytorchs_operations_have_the_bits_of_a_norm_and_megatrons_rotation(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        query, key, _, *gains = draw(shape, dtype)
        angles = torch.randn(shape.s, 1, 1, shape.r // 2, generator=torch.Generator().manual_seed(9))
        angles = torch.cat((angles, angles), 3)
        operands = query, key, rotary_turns(angles), *gains

        def megatrons(query: Tensor, key: Tensor, *rest: object, angles: Tensor = angles) -> tuple[Tensor, Tensor]:
            _, query_gain, key_gain, epsilon = rest
            if query_gain is not None:
                query, key = torch_rms_norm(query, query_gain, epsilon), torch_rms_norm(key, key_gain, epsilon)
            return _apply_rotary_pos_emb_bshd(query, angles), _apply_rotary_pos_emb_bshd(key, angles)

        found = outcome(implementation_of("rotated_heads", "torch"), operands)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, outcome(megatrons, operands), strict=True))


@pytest.mark.skipif(bool(unavailable("triton", "cpu")), reason=str(unavailable("triton", "cpu")))
def test_results_are_the_same_in_every_run_and_at_any_strides() -> None:
    operands = draw(SHAPES[0], torch.bfloat16)
    function = implementation_of("rotated_heads", "triton")
    contiguous = operands[0].contiguous(), operands[1].contiguous(), *operands[2:]
    # Neighbours in memory are tokens, so that heads are copied.
    turned_around = operands[0].permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2), *operands[1:]
    first = outcome(function, operands)
    for other in (operands, contiguous, turned_around):
        assert all(torch.equal(a, b) for a, b in zip(first, outcome(function, other), strict=True))
    assert all(each.is_contiguous() for each in first[:2])


@pytest.mark.skipif(bool(unavailable("triton", "cpu")), reason=str(unavailable("triton", "cpu")))
def test_a_gradient_that_one_kind_of_heads_does_not_get_is_zero() -> None:
    query, key, turns, *gains = draw(SHAPES[1], torch.float32)
    leaves = [each.detach().requires_grad_() for each in (query, key)]
    turned, _ = implementation_of("rotated_heads", "triton")(*leaves, turns, *gains, 1e-5)
    of_query, of_key = torch.autograd.grad(turned.sum(), leaves)
    assert of_query.abs().max() > 0
    assert not of_key.any()


@pytest.mark.skipif(bool(unavailable("triton", "cpu")), reason=str(unavailable("triton", "cpu")))
def test_the_operator_is_what_tracing_is_told() -> None:
    from kernels.rotated_heads import triton_op

    for shape in SHAPES[1:4]:
        operands = draw(shape, torch.float32)
        torch.library.opcheck(triton_op._rotated_heads, (*operands, 1e-5))
        query, key, turns, *gains = operands
        _, _, scales = triton_op._rotated_heads(*operands, 1e-5)
        torch.library.opcheck(triton_op._gradients, (query, key, query, key, turns, *gains, scales))


def test_a_tile_covers_a_head() -> None:
    for width in (2, 6, 64, 96, 128, 192, 256):
        for turning in range(2, width + 1, 2):
            tile = heads_tile(width, turning)
            assert (2 * tile.half >= turning, tile.rest >= width - turning) == (True, True)
            assert tile.rows * (2 * tile.half + tile.rest) <= max(4 * 32 * 16, 2 * tile.half + tile.rest)
