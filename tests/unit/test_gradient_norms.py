"""Squares of gradients are summed in fp64, without an fp64 copy of a large one."""

from __future__ import annotations

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pretrain.engine import gradient_norms
from pretrain.engine.gradient_norms import sums_of_squares


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_fp64(numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_norms, "NORM_PART_ELEMENTS", 8)
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).mul(1e-4).to(dtype)
    (found,) = sums_of_squares([gradient])
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(math.fsum(value * value for value in gradient.double().tolist()), rel=1e-15)


def test_parts_share_one_copy_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_norms, "NORM_PART_ELEMENTS", 1 << 10)
    gradient = torch.ones(1 << 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        sums_of_squares([gradient])
    assert sum(event.self_cpu_memory_usage >= 8 << 10 for event in profiler.events()) == 1


def test_no_more_than_a_part_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_norms, "NORM_PART_ELEMENTS", 1 << 12)
    gradient = torch.ones(1 << 16)

    def largest_allocation(parted: bool) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            if parted:
                sums_of_squares([gradient])
            else:
                torch.linalg.vector_norm(gradient, dtype=torch.float64)
        return max(event.self_cpu_memory_usage for event in profiler.events())

    assert largest_allocation(parted=False) >= 8 << 16
    assert largest_allocation(parted=True) <= 2 * (8 << 12)


def test_a_gpu_sums_the_squares_of_one_dtype_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the branch of a GPU, by PyTorch's CPU kernels: in the order of the gradients, empty ones among them."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    kinds = [(5, torch.float32), (0, torch.float32), (7, torch.bfloat16), (64, torch.float32), (3, torch.bfloat16)]
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(numel, generator=generator).to(dtype) for numel, dtype in kinds]
    expected = [float(gradient.double().square().sum()) for gradient in gradients]
    found = sums_of_squares(gradients)
    assert {each.dtype for each in found} == {torch.float64}
    # PyTorch's CPU kernels add in the gradients' own precision, a GPU's in fp64.
    assert [float(each) for each in found] == pytest.approx(expected, rel=1e-2)
