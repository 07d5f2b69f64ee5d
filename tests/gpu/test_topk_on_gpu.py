"""The selections of retrieval on a GPU: the very ids of their twins on the CPU, and no waiting for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.implementations import Implementation
from tests.unit.test_topk import CASES, IMPLEMENTATIONS, Case, both

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
