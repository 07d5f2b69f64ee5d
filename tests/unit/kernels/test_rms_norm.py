"""The norm and its gradients, of every implementation against the twin's in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.common.tiles import MAX_NORM_COLUMNS, norm_tile
from kernels.implementations import Implementation, unavailable
from kernels.parity import TOLERANCE
from kernels.rms_norm import naive
from kernels.select import implementation_of

IMPLEMENTATIONS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(unavailable(name, "cpu")), reason=str(unavailable(name, "cpu"))))
    for name in ("torch", "triton")
]
needs_triton = pytest.mark.skipif(bool(unavailable("triton", "cpu")), reason=str(unavailable("triton", "cpu")))
# Short rows, of which a program has several; odd widths; a row that fills a tile; one row; none; one column.
SHAPES = ((9, 4, 3, 64), (70, 2, 24), (5, 77), (3, 1024), (1, 1, 768), (0, 2, 16), (6, 1))


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, gain = torch.randn(*shape, generator=generator), 1 + torch.randn(shape[-1], generator=generator)
    return x.to(dtype), gain.to(dtype)


def outcome(function: Callable[..., Tensor], x: Tensor, gain: Tensor) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in (x, gain)]
    out = function(*leaves, 1e-2)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_and_gradients_are_the_twins(implementation: Implementation, shape: tuple[int, ...]) -> None:
    for dtype, tolerance in (*TOLERANCE.items(), (torch.float64, 1e-13)):
        x, gain = draw(shape, dtype)
        expected = outcome(naive.rms_norm, x.double(), gain.double())
        found = outcome(implementation_of("rms_norm", implementation), x, gain)
        for ours, reference in zip(found, expected, strict=True):
            assert (ours.shape, ours.dtype) == (reference.shape, dtype)
            largest = float(reference.abs().max()) if reference.numel() else 0.0
            torch.testing.assert_close(ours.double(), reference, rtol=0, atol=tolerance * largest)


@needs_triton
def test_programs_add_up_gains_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.common.tiles._GAIN_PROGRAMS", 2)
    x, gain = draw((300, 40), torch.float32)
    expected = outcome(naive.rms_norm, x.double(), gain.double())
    for ours, reference in zip(outcome(implementation_of("rms_norm", "triton"), x, gain), expected, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=0, atol=2e-6 * float(reference.abs().max()))


@needs_triton
def test_strides_change_nothing_and_a_split_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gain = draw((5, 3, 4, 24), torch.bfloat16)
    function = implementation_of("rms_norm", "triton")
    expected = outcome(function, x, gain)
    of_split = torch.cat((x, x), 3)[..., 24:]
    of_product = torch.cat((x.flatten(2), x.flatten(2)), 2)[..., 96:].unflatten(2, (4, 24))
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    by_columns = x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    for other in (x, turned, by_columns):
        assert all(torch.equal(a, b) for a, b in zip(expected, outcome(function, other, gain), strict=True))

    def refused(self: Tensor) -> Tensor:
        raise AssertionError("a copy")

    monkeypatch.setattr(Tensor, "contiguous", refused)
    for other in (of_split, of_product):
        assert torch.equal(expected[0], function(other, gain, 1e-2))


@needs_triton
def test_wider_rows_are_pytorchs() -> None:
    x, gain = draw((2, MAX_NORM_COLUMNS + 1), torch.float32)
    found = (outcome(implementation_of("rms_norm", name), x, gain) for name in ("triton", "torch"))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_triton
def test_the_operator_is_what_tracing_is_told() -> None:
    from kernels.rms_norm import triton_op

    x, gain = draw((6, 3, 40), torch.float32)
    torch.library.opcheck(triton_op._rms_norm, (x, gain, 1e-5))
    _, scales = triton_op._rms_norm(x, gain, 1e-5)
    torch.library.opcheck(triton_op._gradients, (x, x, gain, scales))


def test_a_tile_covers_a_row() -> None:
    for width in (1, 24, 64, 192, 768, 1025, MAX_NORM_COLUMNS):
        tile = norm_tile(width)
        assert tile.columns >= width
        assert tile.entries * tile.columns <= max(tile.num_warps * 32 * 16, tile.columns)
