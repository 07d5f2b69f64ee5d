"""The scores of kept entries, and the two ways of summing their gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.kept_scores import kept_of_both, kept_scores, sum_by_id, sums_of_both


def draw(tokens: int, heads: int, keys: int, scores: int, kept: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(tokens, heads, keys, scores, generator=generator, dtype=torch.float64)
    return values.requires_grad_(), torch.randint(0, keys, (tokens, heads, kept), generator=generator)


@pytest.mark.parametrize("shape", [(5, 2, 7, 2, 20), (3, 1, 4, 1, 1), (0, 2, 4, 2, 3)])
def test_kept_scores_are_a_gather(shape: tuple[int, int, int, int, int]) -> None:
    scores, ids = draw(*shape)
    expected = scores.gather(2, ids.unsqueeze(3).expand(-1, -1, -1, shape[3]))
    kept = kept_scores(scores, ids)
    assert torch.equal(kept, expected)
    weight = torch.randn_like(kept)
    (mine,) = torch.autograd.grad(kept, scores, weight)
    (theirs,) = torch.autograd.grad(expected, scores, weight)
    assert torch.equal(mine, theirs)
    torch.testing.assert_close(sum_by_id(weight, ids, shape[2]), theirs, rtol=1e-14, atol=1e-14)


def test_a_key_that_every_entry_keeps_gets_the_sum_of_all() -> None:
    _, ids = draw(2, 2, 6, 3, 40)
    gradient = torch.ones(2, 2, 40, 3)
    total = sum_by_id(gradient, torch.full_like(ids, 4), 6)
    assert torch.equal(total[:, :, 4], torch.full((2, 2, 3), 40.0))
    assert total.sum() == gradient.sum()


def test_both_sides_in_bf16_have_sums_that_are_rounded_once_where_the_scores_lie() -> None:
    """The gradient of products [2, R, T, H, N] lies in memory as they do, whichever way it is added up."""
    tokens, heads, keys, rank = 5, 2, 7, 2
    generator = torch.Generator().manual_seed(3)
    products = torch.randn(2, rank, tokens, heads, keys, generator=generator).bfloat16()
    scores = products.permute(0, 2, 3, 4, 1).requires_grad_()
    entries = torch.randint(0, keys, (2, tokens, heads, 20), generator=generator)
    kept = kept_of_both(scores, entries)
    by_side = [kept_scores(side.float(), ids) for side, ids in zip(scores, entries, strict=True)]
    assert torch.equal(kept, torch.stack(by_side))
    weight = torch.randn(kept.shape, generator=generator)
    (mine,) = torch.autograd.grad(kept, scores, weight)
    wide = scores.detach().float().requires_grad_()
    sums = torch.stack([kept_scores(side, ids) for side, ids in zip(wide, entries, strict=True)])
    (theirs,) = torch.autograd.grad(sums, wide, weight)
    assert torch.equal(mine, theirs.bfloat16())
    assert mine.stride() == scores.stride()
    torch.testing.assert_close(sums_of_both(weight, entries, keys), theirs, rtol=1e-5, atol=1e-5)
