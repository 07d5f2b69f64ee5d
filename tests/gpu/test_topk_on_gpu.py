"""Selections of retrieval and hashes of n-grams on a GPU: the very numbers of their twins on the CPU, and no waiting for
the device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.implementations import Implementation, unavailable
from kernels.ngram_hashes.naive import ngram_hashes
from kernels.parity import hash_problems, selection_problems
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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_hashes_equal_their_twins_on_cpu(gpu: torch.device, implementation: Implementation) -> None:
    kernels = select_kernels(implementation, device_type="cuda")
    assert list(hash_problems(kernels, gpu)) == []


@needs_triton_on_gpu
def test_more_hashes_than_32_bits_count(gpu: torch.device) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 20 * 2**30:
        pytest.skip(f"needs 20 GiB of GPU memory, and {free / 2**30:.0f} are free")
    generator, num_tokens, num_groups = torch.Generator().manual_seed(1), 1 << 20, 2**11 + 1
    ids = torch.randint(0, 50_000, (2 + num_tokens, 1), generator=generator)
    multipliers = torch.randint(0, 2**40, (num_groups, 3), generator=generator)
    moduli, offsets = torch.randint(1, 2**40, (2, num_groups, 1), generator=generator)
    of_groups = (multipliers, moduli, offsets, torch.full((num_groups,), 3))
    tokens, rules = (ids, torch.arange(num_tokens).unsqueeze(1)), (torch.tensor(0), torch.tensor(0), "xor", False, None)
    found = select_kernels("triton", device_type="cuda").ngram_hashes(*on(gpu, (*tokens, *of_groups, *rules)))
    assert torch.equal(found[-1:].cpu(), ngram_hashes(*tokens, *(each[-1:] for each in of_groups), *rules))


def test_nothing_waits_for_the_device(gpu: torch.device) -> None:
    hashes = select_kernels("triton", device_type="cuda").ngram_hashes
    tokens = (torch.zeros(10, 2, dtype=torch.int64), torch.arange(8).unsqueeze(1).repeat(1, 2))
    of_groups = (torch.ones(4, 3, dtype=torch.int64), *torch.ones(2, 4, 2, dtype=torch.int64), torch.full((4,), 3))
    ids = torch.tensor(0), torch.tensor(0)
    calls = [(hashes, on(gpu, (*tokens, *of_groups, *ids, "sum", True, None)))]
    calls += [(select, on(gpu, arguments(PAPERS))) for select, _, arguments in both("triton")]
    for select, values in calls:
        select(*values)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            select(*values)
        finally:
            torch.cuda.set_sync_debug_mode("default")
