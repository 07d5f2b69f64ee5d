"""Results of norms and activations, and what they keep for backward: their input, and next to nothing besides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.rms_norm.op import torch_rms_norm
from kernels.swiglu.op import torch_swiglu as swiglu

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def plain_norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain.to(wide.dtype)).to(x.dtype)


def plain_swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def kept_bytes(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Bytes of storages that a graph holds beyond those of its inputs."""
    held: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function(*inputs)
    assert out.requires_grad
    return sum(num for at, num in held.items() if at not in {x.untyped_storage().data_ptr() for x in inputs})


@DTYPES
def test_a_norm_and_its_gradients_are_the_formulas(dtype: torch.dtype) -> None:
    x, gain, grad = normal(7, 3, 40, dtype=dtype), normal(40, dtype=dtype), normal(7, 3, 40, dtype=dtype)
    ours = [tensor.clone().requires_grad_() for tensor in (x, gain)]
    theirs = [tensor.double().requires_grad_() for tensor in (x, gain)]
    out, expected = torch_rms_norm(*ours, 1e-5), plain_norm(*theirs)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == dtype
    rounding = 4 * torch.finfo(dtype).eps
    for actual, wanted in zip((out, *(t.grad for t in ours)), (expected, *(t.grad for t in theirs)), strict=True):
        assert actual is not None
        assert wanted is not None
        assert float((actual.double() - wanted).abs().max()) <= rounding * float(wanted.abs().max())


def test_derivatives_of_norms_are_those_of_finite_differences() -> None:
    x, gain = normal(3, 2, 9, dtype=torch.float64), normal(9, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *of: torch_rms_norm(*of, 1e-5), (x.requires_grad_(), gain.requires_grad_()), raise_exception=True
    )


@pytest.mark.parametrize("trained", [(True, False), (False, True)], ids=["input", "gain"])
def test_what_needs_no_gradient_gets_none(trained: tuple[bool, bool]) -> None:
    both = [normal(5, 8, dtype=torch.float32), normal(8, dtype=torch.float32)]
    wanted = [tensor.clone().requires_grad_() for tensor in both]
    torch_rms_norm(*wanted, 1e-5).sum().backward()
    some = [tensor.clone().requires_grad_(needs) for tensor, needs in zip(both, trained, strict=True)]
    torch_rms_norm(*some, 1e-5).sum().backward()
    for actual, full, needs in zip(some, wanted, trained, strict=True):
        assert (actual.grad is not None) == needs
        assert not needs or torch.equal(actual.grad, full.grad)  # type: ignore[arg-type]


@DTYPES
def test_an_activation_is_the_formula_to_the_bit(dtype: torch.dtype) -> None:
    x, grad = 3 * normal(11, 24, dtype=dtype), normal(11, 12, dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = swiglu(ours), plain_swiglu(theirs)
    out.backward(grad)
    expected.backward(grad)
    assert torch.equal(out, expected)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_little_is_kept_besides_the_input(dtype: torch.dtype) -> None:
    x, gain = normal(50, 64, dtype=dtype).requires_grad_(), normal(64, dtype=dtype).requires_grad_()
    # A number per row, in fp32; by itself PyTorch keeps one or two of the size of the input in it.
    assert kept_bytes(lambda *of: torch_rms_norm(*of, 1e-5), x, gain) == 50 * 4
    assert kept_bytes(plain_norm, x, gain) >= (1 if dtype == torch.float32 else 2) * 50 * 64 * 4
    assert kept_bytes(swiglu, x) == 0
    assert kept_bytes(plain_swiglu, x) >= 50 * 32 * x.element_size()
