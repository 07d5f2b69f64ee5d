"""Products with keys whose rows are aligned, against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamem.layers.key_products import _filled, aligned_products, key_products


def operands(num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(num_keys)
    queries = torch.randn(9, 4, 6, generator=g).transpose(0, 1)
    keys = torch.randn(4, num_keys, 6, generator=g).transpose(1, 2)
    return queries, keys, torch.randn(4, 9, num_keys, generator=g)


@pytest.mark.parametrize("num_keys", [1, 7, 8, 13])
@pytest.mark.parametrize("kind", ["plain", "filled", "part of another"])
def test_aligned_products_and_gradients_are_pytorchs(num_keys: int, kind: str) -> None:
    queries, keys, gradient = operands(num_keys)
    results = []
    for function in (torch.bmm, lambda q, k: aligned_products(q, k, 8)):
        leaves = [tensor.clone().requires_grad_() for tensor in (queries, keys)]
        out = function(*leaves)
        room = {"plain": num_keys, "filled": -(-num_keys // 8) * 8, "part of another": 24}[kind]
        given = torch.zeros(4, 9, room)
        if kind == "part of another":
            given.fill_(float("nan"))
        given = given[..., :num_keys].copy_(gradient)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, given)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert results[1][0].stride(1) % 8 == 0


def test_a_gradient_with_room_is_multiplied_where_it_is() -> None:
    _, _, gradient = operands(13)
    room = torch.zeros(4, 9, 16)
    assert _filled(room[..., :13].copy_(gradient), 8).data_ptr() == room.data_ptr()
    assert _filled(gradient, 8).shape == (4, 9, 16)
    # A storage that goes on has more in its gaps than zeros.
    assert _filled(torch.zeros(5, 9, 16)[:4, :, :13], 8).untyped_storage().nbytes() == room.nbytes


def test_a_cpu_multiplies_as_pytorch_does() -> None:
    queries, keys, _ = operands(13)
    found = key_products(queries, keys)
    assert torch.equal(found, torch.bmm(queries, keys))
    assert found.is_contiguous()


def test_keys_that_stand_still_want_no_gradient() -> None:
    queries, keys, gradient = operands(13)
    out = aligned_products(queries.requires_grad_(), keys, 8)
    (found,) = torch.autograd.grad(out, queries, gradient)
    torch.testing.assert_close(found, gradient @ keys.transpose(1, 2))
