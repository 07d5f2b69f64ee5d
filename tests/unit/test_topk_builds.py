"""Retrieval's Triton kernels compiled for GPUs that are not there, as the launchers launch them at the papers'
shapes.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.unit.topk_builds import SHAPES
from tests.unit.triton_builds import reports_of, triton_minor

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason='Triton is not installed: pip install "megamem[gpu]"'
)
# Bytes of a block without opting in to more, on every one of these GPUs; and of a thread.
MAX_SHARED_BYTES, MAX_SPILLED_BYTES = 48 * 1024, 0
# Versions of Triton that do worse: bytes that a block shares (Triton opts in), bytes that a thread of a grid of 128 x
# 128 spills.
OF_OTHER_TRITONS = {"3.6": (64 * 1024, 344), "3.8": (48 * 1024, 72)}
# Registers of an SM.
REGISTERS = 65_536
KERNELS = {
    "tucker_topk": {
        *("collect_lists_kernel", "sort_lists_kernel", "collect_grid_kernel", "sort_candidates_kernel"),
        "shuffled_rows_kernel",
    },
    "product_topk": {"collect_lists_kernel", "sort_lists_kernel", "collect_sums_kernel", "sort_candidates_kernel"},
}


@pytest.fixture(scope="module")
def builds() -> list[dict[str, Any]]:
    return reports_of("tests.unit.topk_builds")


def test_every_kernel_compiles_for_every_capability_and_shape(builds: list[dict[str, Any]]) -> None:
    built = {(build["kernel"], build["capability"], json.dumps(build["shape"])) for build in builds}
    expected = sum(len(KERNELS[shape.selection]) * len(shape.capabilities) for shape in SHAPES)
    assert len(built) == len(builds) == expected
    for build in builds:
        assert build["kernel"] in KERNELS[build["shape"]["selection"]]


@pytest.fixture(scope="module")
def limits() -> tuple[int, int]:
    """Bytes that a block may share and a thread may spill."""
    return OF_OTHER_TRITONS.get(triton_minor(), (MAX_SHARED_BYTES, MAX_SPILLED_BYTES))


def test_the_candidates_stay_in_registers(builds: list[dict[str, Any]], limits: tuple[int, int]) -> None:
    spilling = [build for build in builds if build["spilled_bytes"] > limits[1]]
    assert not spilling, spilling


def test_a_block_fits_on_every_gpu(builds: list[dict[str, Any]], limits: tuple[int, int]) -> None:
    greedy = [
        build
        for build in builds
        if build["shared_bytes"] > limits[0] or build["registers"] * build["threads"] > REGISTERS
    ]
    assert not greedy, greedy
