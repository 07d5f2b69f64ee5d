"""The Triton kernels compiled for GPUs that are not there: resources, and the width of their loads in the machine code."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.unit.triton_builds import CAPABILITIES, SHAPES, reports_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason='Triton is not installed: pip install "megamem[gpu]"'
)
# Shared memory of a block without opting in to more, on every one of these GPUs.
MAX_SHARED_BYTES = 48 * 1024
# Registers of a thread: the 65,536 registers of an SM then hold 20 warps, which wait for rows by turns.
MAX_REGISTERS = 65_536 // (20 * 32)


@pytest.fixture(scope="module")
def builds() -> list[dict[str, Any]]:
    return reports_of("tests.unit.triton_builds")


def test_every_kernel_compiles_for_every_capability_and_shape(builds: list[dict[str, Any]]) -> None:
    kernels = {"gather_sum_kernel", "gather_dot_kernel", "segment_accumulate_kernel"}
    built = {(build["kernel"], build["capability"], json.dumps(build["shape"])) for build in builds}
    assert len(built) == len(CAPABILITIES) * len(kernels) * len(SHAPES)
    assert {kernel for kernel, _, _ in built} == kernels


def test_nothing_spills(builds: list[dict[str, Any]]) -> None:
    spilling = [build for build in builds if build["stack_bytes"] + build["local_bytes"]]
    assert not spilling, spilling


def test_resources_leave_room_for_many_warps(builds: list[dict[str, Any]]) -> None:
    greedy = [b for b in builds if b["registers"] > MAX_REGISTERS or b["shared_bytes"] > MAX_SHARED_BYTES]
    assert not greedy, greedy


def test_rows_are_loaded_sixteen_bytes_at_a_time(builds: list[dict[str, Any]]) -> None:
    """Narrower loads are those of ids, coefficients and blocks alone: one element per row, which no thread has more
    than its tile's rows of.
    """
    for build in builds:
        wide = build["load_bits"].get("128", 0)
        element_bits = 16 if build["shape"]["dtype"] == "bf16" else 32
        per_row = {str(element_bits), "32", "64"}
        assert wide >= 2, build
        assert set(build["load_bits"]) <= {"128", *per_row}, build
