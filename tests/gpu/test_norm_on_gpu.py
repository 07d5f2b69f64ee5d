"""Norms on a GPU, in every implementation that it runs: values, gradients, and what is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.implementations import Implementation
from kernels.rms_norm.op import torch_rms_norm
from kernels.select import select_kernels

IMPLEMENTATIONS: tuple[Implementation, ...] = ("torch", "triton")


def some(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 768, 2048])
def test_norms_are_those_of_the_cpu(
    gpu: torch.device, implementation: Implementation, dtype: torch.dtype, width: int
) -> None:
    found = []
    for device, norm in (
        (torch.device("cpu"), torch_rms_norm),
        (gpu, select_kernels(implementation, device_type="cuda").rms_norm),
    ):
        x, gain = (
            tensor.to(device).requires_grad_() for tensor in (some(33, 4, width, dtype=dtype), some(width, dtype=dtype))
        )
        out = norm(x, gain, 1e-5)
        out.backward(some(33, 4, width, dtype=dtype).to(device))
        assert x.grad is not None
        assert gain.grad is not None
        found.append([tensor.detach().double().cpu() for tensor in (out, x.grad, gain.grad)])
    for ours, twins in zip(*found, strict=True):
        assert float((ours - twins).abs().max()) <= 4 * torch.finfo(dtype).eps * float(twins.abs().max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_norm_keeps_its_input_and_a_number_per_row(gpu: torch.device, implementation: Implementation) -> None:
    norm = select_kernels(implementation, device_type="cuda").rms_norm
    x = some(512, 1024, dtype=torch.bfloat16).to(gpu).requires_grad_()
    gain = some(1024, dtype=torch.bfloat16).to(gpu).requires_grad_()
    norm(x, gain, 1e-5)
    before = torch.cuda.memory_allocated(gpu)
    out = norm(x, gain, 1e-5)
    kept = torch.cuda.memory_allocated(gpu) - before - out.untyped_storage().nbytes()
    assert kept <= 512 * 4 + 4096
