"""The memory kernels on a GPU: parity with their twins, 64-bit offsets, reproducibility, no waiting for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.implementations import Implementation, unavailable
from kernels.normal_product import naive
from kernels.parity import (
    TOLERANCE,
    backbone_problems,
    loss_problems,
    parity_problems,
    stream_problems,
    update_problems,
)
from kernels.segment_accumulate.op import torch_segment_accumulate
from kernels.select import Kernels, select_kernels


@pytest.fixture(params=["triton", "torch"], scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    implementation: Implementation = request.param
    if reason := unavailable(implementation, "cuda"):
        pytest.skip(f"{implementation} {reason}")
    return select_kernels(implementation, device_type="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parity(kernels: Kernels, gpu: torch.device, dtype: torch.dtype) -> None:
    assert list(parity_problems(kernels, gpu, dtype)) == []
    assert list(backbone_problems(kernels, gpu, dtype)) == []
    assert list(stream_problems(kernels, gpu, dtype)) == []
    assert list(loss_problems(kernels, gpu, dtype)) == []


def test_updates_have_the_bits_of_their_twins(kernels: Kernels, gpu: torch.device) -> None:
    assert list(update_problems(kernels, gpu)) == []


def test_offsets_past_two_to_the_31(kernels: Kernels, gpu: torch.device) -> None:
    """The last rows of a table of 2^31 + 2^20 elements, against a table of those rows alone."""
    width, num_rows = 256, (2**31 + 2**20) // 256
    free, _ = torch.cuda.mem_get_info()
    if free < 16 * 2**30:
        pytest.skip(f"needs 16 GiB of GPU memory, and {free / 2**30:.0f} are free")
    generator = torch.Generator(gpu).manual_seed(0)
    last = torch.randn(1000, width, device=gpu, generator=generator).bfloat16()
    table = torch.zeros(num_rows, width, device=gpu, dtype=torch.bfloat16)
    table[-1000:] = last
    ids = torch.randint(0, 1000, (64, 32), device=gpu, generator=generator)
    coef = torch.randn(64, 32, 1, device=gpu, generator=generator).bfloat16()
    x = torch.randn(64, width, device=gpu, generator=generator).bfloat16()
    far = ids + num_rows - 1000
    assert torch.equal(kernels.gather_sum(table, far, coef), kernels.gather_sum(last, ids, coef))
    assert torch.equal(kernels.gather_dot(table, far, x, 1), kernels.gather_dot(last, ids, x, 1))
    del table
    far_sums = torch.zeros(num_rows, width, device=gpu)
    near_sums = torch.zeros(1000, width, device=gpu)
    kernels.segment_accumulate(far_sums, far, coef, x)
    kernels.segment_accumulate(near_sums, ids, coef, x)
    assert torch.equal(far_sums[-1000:], near_sums)
    assert not far_sums[:-1000].any()


def test_repeats_are_bit_identical(kernels: Kernels, gpu: torch.device) -> None:
    """One row that everybody reads among others: the order of additions is that of the entries."""
    generator = torch.Generator(gpu).manual_seed(0)
    ids = torch.randint(0, 500, (2048, 32), device=gpu, generator=generator)
    ids[:, ::3] = 7
    coef = torch.randn(2048, 32, 2, device=gpu, generator=generator)
    vec = torch.randn(2048, 192, device=gpu, generator=generator)

    def run() -> Tensor:
        sums = torch.zeros(500, 192, device=gpu)
        kernels.segment_accumulate(sums, ids.clone(), coef, vec)
        return sums

    first = run()
    assert all(torch.equal(run(), first) for _ in range(5))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_many_tokens_keep_their_digits_and_repeat(
    kernels: Kernels, gpu: torch.device, dtype: torch.dtype, centred: bool
) -> None:
    """Sums of parts, each over many tiles: tensor cores that added up one of them alone would lose two digits."""
    if kernels.implementations["normal_product"] == "torch":
        pytest.skip("the order of PyTorch's sums is cuBLAS's")
    generator = torch.Generator(gpu).manual_seed(0)
    x = (1 + torch.randn(8192, 8192, device=gpu, generator=generator)).to(dtype)
    weight, upstream = (torch.randn(*shape, device=gpu, generator=generator) for shape in ((24, 8192), (8192, 24)))

    def outcome(function: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in operands]
        out = function(*leaves, 1e-6, centred)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]

    expected = outcome(naive.normal_product, x.double(), weight.double())
    first, again = outcome(kernels.normal_product, x, weight), outcome(kernels.normal_product, x, weight)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for ours, reference in zip(first, expected, strict=True):
        assert float((ours.double() - reference).abs().max() / reference.abs().max()) <= TOLERANCE[ours.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [240, 60, 20, 30, 10])
def test_gradients_of_rows_are_those_of_the_cpu_to_the_bit(
    kernels: Kernels, gpu: torch.device, width: int, dtype: torch.dtype
) -> None:
    """As long as a row is read no more often than a block of Triton's is long."""
    if kernels.implementations["segment_accumulate"] == "torch":
        pytest.skip("index_put_ of PyTorch adds in an order of its own")
    generator = torch.Generator().manual_seed(0)
    # 65,536 entries: 10 to 40 reads of most rows.
    ids = torch.randint(0, 2500, (2048, 32), generator=generator)
    assert ids.flatten().bincount().max() <= 128
    coef = torch.randn(2048, 32, 1, generator=generator).to(dtype)
    vec = torch.randn(2048, width, generator=generator).to(dtype)
    start = torch.randn(2500, width, generator=generator)
    on_gpu, on_cpu = start.to(gpu), start.clone()
    kernels.segment_accumulate(on_gpu, ids.to(gpu), coef.to(gpu), vec.to(gpu))
    torch_segment_accumulate(on_cpu, ids, coef, vec)
    assert torch.equal(on_gpu.cpu(), on_cpu)


def test_nothing_waits_for_the_device(kernels: Kernels, gpu: torch.device) -> None:
    if kernels.implementations["segment_accumulate"] == "torch":
        pytest.skip("index_put_ of PyTorch may wait; the Triton kernels may not")
    table = torch.nn.Parameter(torch.randn(1000, 192, device=gpu))
    table.main_grad = torch.zeros_like(table)  # type: ignore[attr-defined]
    ids = torch.randint(0, 1000, (64, 32), device=gpu)
    coef = torch.randn(64, 32, 2, device=gpu, requires_grad=True)
    x = torch.randn(64, 192, device=gpu, requires_grad=True)

    def step() -> None:
        products = kernels.gather_dot(table, ids, x)
        kernels.gather_sum(table, ids, coef * products).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
