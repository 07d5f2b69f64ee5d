"""The loss's kernels against their twins, in every implementation.

Triton's kernels run in its interpreter (`conftest.py`), in few launches.

Legend: n tokens, V ids.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.select import Kernels
from kernels.softmax_gradient import naive as naive_gradient
from kernels.softmax_sums import naive as naive_sums
from tests.unit.kernels.cases import TOLERANCE

# n, V: one id; odd rows, of which all but the first are aligned to nothing; a whole tile; several and a rest, with rows of
# which a lane has neighbours only; one token; none.
SHAPES = [(3, 1), (4, 7), (3, 257), (2, 4096), (2, 8193), (2, 4104), (1, 96), (0, 24)]


def drawn(num_tokens: int, num_ids: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, V] up to some 20, places, of which the first two are elsewhere, and the losses' gradients [n]."""
    g = torch.Generator().manual_seed(num_ids)
    logits = (5 * torch.randn(num_tokens, num_ids, generator=g, dtype=torch.float64)).to(dtype)
    places = torch.randint(0, num_ids, (num_tokens,), generator=g)
    if num_tokens > 2:
        places[:2] = torch.tensor([num_ids, -1])
    wide = torch.promote_types(dtype, torch.float32)
    return logits, places, torch.randn(num_tokens, generator=g, dtype=torch.float64).to(wide)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, wanted: torch.dtype) -> None:
    """Equal up to roundings of `dtype`, relative to the largest element; `found` is of the dtype that is wanted."""
    assert found.dtype == wanted
    assert found.shape == expected.shape
    largest = float(expected.nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype] * largest, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_and_gradients_are_the_twins(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits, places, scale = drawn(*shape, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    expected = naive_sums.softmax_sums(logits.double(), places)
    found = kernels.softmax_sums(logits.clone(), places)
    for part, of_twin in zip(found, expected, strict=True):
        assert_close(part, of_twin, wide, wide)
    # Logits themselves are exact.
    assert torch.equal(found[0].double(), expected[0])
    assert torch.equal(found[2].double(), expected[2])
    gradient = kernels.softmax_gradient(logits.clone(), places, *found[:2], scale)
    of_twin = naive_gradient.softmax_gradient(logits.double(), places, *expected[:2], scale.double())
    assert_close(gradient, of_twin, dtype, dtype)


@pytest.mark.parametrize("shape", [(4, 33), (3, 4104)], ids=str)
def test_the_twins_are_pytorchs_cross_entropy(shape: tuple[int, int]) -> None:
    logits, _, scale = drawn(*shape, torch.float64)
    places = torch.arange(shape[0])
    top, total, of_target = naive_sums.softmax_sums(logits, places)
    logits.requires_grad_()
    losses = torch.nn.functional.cross_entropy(logits, places, reduction="none")
    torch.testing.assert_close(total.log() + top - of_target, losses, rtol=1e-13, atol=0)
    (expected,) = torch.autograd.grad(losses, logits, scale)
    found = naive_gradient.softmax_gradient(logits.detach(), places, top, total, scale)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ids_that_are_ruled_out_and_rows_of_them(kernels: Kernels, dtype: torch.dtype) -> None:
    """Logits of -inf have no share; a row of them has no total, whose loss elsewhere is decided by the other ranks."""
    logits, places, scale = drawn(4, 5000, dtype)
    # All of the first tile, a target, and a row.
    logits[0, :4096], logits[2, places[2]], logits[3] = -torch.inf, -torch.inf, -torch.inf
    top, total, of_target = kernels.softmax_sums(logits.clone(), places)
    expected = naive_sums.softmax_sums(logits.double(), places)
    for found, of_twin in zip((top, total, of_target), expected, strict=True):
        torch.testing.assert_close(found.double(), of_twin, rtol=2e-6, atol=0)
    assert (float(top[3]), float(total[3]), float(of_target[2])) == (-torch.inf, 0.0, -torch.inf)
    # The largest logit and the total of another rank.
    top[3], total[3] = 1.0, 2.0
    gradient = kernels.softmax_gradient(logits.clone(), places, top, total, scale)
    of_twin = naive_gradient.softmax_gradient(logits.double(), places, top.double(), total.double(), scale.double())
    assert_close(gradient, of_twin, dtype, dtype)
    assert not gradient[0, :4096].any()


def test_what_is_not_a_number_reaches_the_loss(kernels: Kernels) -> None:
    for row in (torch.tensor([1.0, torch.nan, 2.0]), torch.full((3,), torch.nan), torch.tensor([1.0, torch.inf, 2.0])):
        top, total, of_target = kernels.softmax_sums(row.unsqueeze(0), torch.tensor([0]))
        assert (total.log() - (of_target - top)).isnan().all()
        gradient = kernels.softmax_gradient(row.unsqueeze(0), torch.tensor([0]), top, total, torch.ones(1))
        assert gradient.isnan().any()


def test_what_another_rank_holds_is_not_read(kernels: Kernels) -> None:
    """Rows before and behind are no numbers; far places would be outside of memory."""
    logits, _, _ = drawn(3, 40, torch.bfloat16)
    logits[0] = logits[2] = torch.nan
    for place in (-1, -40, 40, 79, 2**40, -(2**40), 2**32 + 3):
        places = torch.full((1,), place)
        top, total, of_target = kernels.softmax_sums(logits[1:2].clone(), places)
        assert (float(of_target), bool(total.isfinite())) == (0.0, True)
        gradient = kernels.softmax_gradient(logits[1:2].clone(), places, top, total, torch.ones(1))
        assert (gradient >= 0).all()


def test_parts_of_a_vocabulary_make_the_whole(kernels: Kernels) -> None:
    """Two ranks' parts, of which one holds each target, as `megamem.backbone.chunked_loss` adds them up."""
    logits, _, scale = drawn(4, 48, torch.float32)
    places, parts = torch.tensor([3, 30, 15, 47]), [slice(0, 16), slice(16, 48)]
    whole = naive_sums.softmax_sums(logits.double(), places)
    of_parts = [kernels.softmax_sums(logits[:, part].contiguous(), places - part.start) for part in parts]
    top = torch.maximum(of_parts[0][0], of_parts[1][0])
    total = sum((own[1] * (own[0] - top).exp() for own in of_parts), torch.zeros(4))
    of_target = of_parts[0][2] + of_parts[1][2]
    for found, expected in zip((top, total, of_target), whole, strict=True):
        assert_close(found, expected, torch.float32, torch.float32)
    gradients = [
        kernels.softmax_gradient(logits[:, part].contiguous(), places - part.start, top, total, scale) for part in parts
    ]
    expected = naive_gradient.softmax_gradient(logits.double(), places, *whole[:2], scale.double())
    assert_close(torch.cat(gradients, 1), expected, torch.float32, torch.float32)


def test_a_gradient_that_is_one_number_expanded(kernels: Kernels) -> None:
    logits, places, _ = drawn(3, 20, torch.float32)
    top, total, _ = kernels.softmax_sums(logits.clone(), places)
    expanded, whole = (
        kernels.softmax_gradient(logits.clone(), places, top, total, scale)
        for scale in (torch.tensor(0.5).expand(3), torch.full((3,), 0.5))
    )
    assert torch.equal(expanded, whole)


def test_a_gradient_lies_where_its_logits_did(kernels: Kernels) -> None:
    """No second tensor of n V elements is held in the logits' dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        logits, places, scale = drawn(3, 20, dtype)
        top, total, _ = kernels.softmax_sums(logits.clone(), places)
        assert kernels.softmax_gradient(logits, places, top, total, scale).data_ptr() == logits.data_ptr()
