"""The selections of retrieval on a GPU: the very ids of their twins on the CPU, and no waiting for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.implementations import Implementation, unavailable
from kernels.parity import selection_problems
from kernels.select import select_kernels
from kernels.shuffled_rows.naive import shuffled_rows
from tests.unit.kernels.test_topk import CASES, Case, both

# Asked of the GPU: without one, the interpreter is asked for, and not here.
needs_triton_on_gpu = pytest.mark.skipif(
    unavailable("triton", "cuda") is not None, reason=f"triton {unavailable('triton', 'cuda')}"
)

IMPLEMENTATIONS = ("torch", pytest.param("triton", marks=needs_triton_on_gpu))
PAPERS = Case(tokens=300, heads=2, keys=3350, row_top_k=128, top_k=768)


def on(device: torch.device, arguments: tuple[object, ...]) -> list[object]:
    return [value.to(device) if isinstance(value, Tensor) else value for value in arguments]


@pytest.mark.parametrize("case", [*CASES, PAPERS, replace(PAPERS, levels=3), replace(PAPERS, nan=0.001)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_selections_equal_their_twins_on_cpu(gpu: torch.device, implementation: Implementation, case: Case) -> None:
    for select, twin, arguments in both(implementation):
        actual = select(*on(gpu, arguments(case)))
        for ours, twins in zip(actual, twin(*arguments(case)), strict=True):
            assert torch.equal(ours.cpu(), twins)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_behind_entries_equal_their_twins_on_cpu(gpu: torch.device, implementation: Implementation) -> None:
    kernels = select_kernels(implementation, device_type="cuda")
    assert [problem for problem in selection_problems(kernels, gpu) if problem.startswith("shuffled_rows")] == []
    # The grid has more entries than 32 bits count, and more of them are asked for than one launch of 2^16 tiles takes.
    entries = torch.randint(0, 100_000**2, (70_000, 600), generator=torch.Generator().manual_seed(1))
    where = (100_000, (3, 2**62 + 5, 2**63 - 1, 1), 10**9, 5, 10**10)
    assert torch.equal(kernels.shuffled_rows(entries.to(gpu), *where)[0].cpu(), shuffled_rows(entries, *where)[0])


def test_nothing_waits_for_the_device(gpu: torch.device) -> None:
    for select, _, arguments in both("triton"):
        values = on(gpu, arguments(PAPERS))
        select(*values)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            select(*values)
        finally:
            torch.cuda.set_sync_debug_mode("default")
