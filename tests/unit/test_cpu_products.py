"""Tests of products of bf16 that are taken in fp32: against fp32 operands, whose product is rounded once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pretrain.engine.session
from parallel.machine.cpu_products import products_in_fp32
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.engine.session import takes_products_in_fp32

OPERATIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(3, 40, 64), (48, 64)]),
    "linear with a bias": (F.linear, [(40, 64), (48, 64), (48,)]),
    "mm": (torch.mm, [(40, 64), (64, 48)]),
    "addmm": (lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0), [(40, 64), (64, 48), (40, 48)]),
    "bmm": (torch.bmm, [(3, 40, 64), (3, 64, 48)]),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b, alpha=0.25), [(3, 40, 64), (3, 64, 48), (3, 40, 48)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 4, 33, 16)] * 3),
}


def drawn(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def results(operation: Callable[..., Tensor], operands: list[Tensor]) -> list[Tensor]:
    """The product, and the gradients of its operands, whose own gradient is drawn."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    out = operation(*leaves)
    (of_out,) = drawn([tuple(out.shape)])
    return [out.detach(), *torch.autograd.grad(out, leaves, of_out.to(out.dtype))]


@pytest.fixture
def wide() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with products_in_fp32():
            yield


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_product_is_that_of_fp32_rounded_once(name: str) -> None:
    operation, shapes = OPERATIONS[name]
    operands = drawn(shapes)
    expected = [each.bfloat16() for each in results(operation, [operand.float() for operand in operands])]
    found = results(operation, operands)
    assert {each.dtype for each in found} == {torch.bfloat16}
    # Backward of attention starts from a forward that was rounded.
    bound = {"rtol": 2**-6, "atol": 2**-6} if name == "attention" else {"rtol": 0.0, "atol": 0.0}
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **bound)
    for first, again in zip(found, results(operation, operands), strict=True):
        assert torch.equal(first, again)


def test_other_dtypes_are_left_alone_and_all_is_undone() -> None:
    def kernels() -> list[str]:
        return [torch._C._dispatch_dump(f"aten::{name}") for name in ("mm", "bmm", "addmm", "baddbmm")]

    a, b = (each.float() for each in drawn([(40, 64), (64, 48)]))
    before, own = kernels(), a @ b
    with products_in_fp32():
        assert kernels() != before
        assert torch.equal(a @ b, own)
        assert (a.double() @ b.double()).dtype == torch.float64
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(a, b.bfloat16())
    assert kernels() == before


@pytest.mark.parametrize(
    ("precision", "multiplies", "expected"), [("bf16", False, True), ("bf16", True, False), ("fp32", False, False)]
)
def test_cores_and_precision_choose(
    monkeypatch: pytest.MonkeyPatch, precision: str, multiplies: bool, expected: bool
) -> None:
    monkeypatch.setattr(pretrain.engine.session, "multiplies_bf16", lambda: multiplies)
    config = RunConfig(train=TrainConfig(precision=precision))  # type: ignore[arg-type]
    assert takes_products_in_fp32(config) == expected
    assert takes_products_in_fp32(RunConfig(), config) == expected
