"""The Triton kernels compiled for GPUs that are not there: resources, and the width of their loads in the machine code."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.unit.triton_builds import CAPABILITIES, PAIR_SHAPES, SHAPES, reports_of, triton_minor

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason='Triton is not installed: pip install "megamem[gpu]"'
)
# Shared memory of a block without opting in to more, on every one of these GPUs.
MAX_SHARED_BYTES = 48 * 1024
# Registers of a thread: the 65,536 registers of an SM then hold 20 warps, which wait for rows by turns.
MAX_REGISTERS = 65_536 // (20 * 32)
# Bytes that a thread of a pair's kernel puts aside in other versions of Triton than 3.7 and 3.9.
SPILLED_BY_OTHER_TRITONS = {"3.6": 8, "3.8": 8}


@pytest.fixture(scope="module")
def builds() -> list[dict[str, Any]]:
    return reports_of("tests.unit.triton_builds")


def test_every_kernel_compiles_for_every_capability_and_shape(builds: list[dict[str, Any]]) -> None:
    of_one_table = {"gather_sum_kernel", "gather_dot_kernel", "segment_accumulate_kernel"}
    of_two = {"gather_pair_kernel", "gather_pair_gradients_kernel", "sum_of_splits_kernel"}
    built = {(build["kernel"], build["capability"], json.dumps(build["shape"])) for build in builds}
    assert len(built) == len(CAPABILITIES) * (len(of_one_table) * len(SHAPES) + len(of_two) * len(PAIR_SHAPES))
    assert {kernel for kernel, _, _ in built} == of_one_table | of_two


def test_nothing_spills(builds: list[dict[str, Any]]) -> None:
    most = SPILLED_BY_OTHER_TRITONS.get(triton_minor(), 0)
    spilling = [build for build in builds if build["stack_bytes"] + build["local_bytes"] > most]
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
        # The parts' sums are all that is read there.
        assert wide >= (1 if build["kernel"] == "sum_of_splits_kernel" else 2), build
        assert set(build["load_bits"]) <= {"128", *per_row}, build


def test_what_a_kernel_wrote_itself_is_not_read_past_its_stores(builds: list[dict[str, Any]]) -> None:
    """A pair reads its own products: not through the read-only path, which may return what was there before."""
    pairs = [build for build in builds if build["shape"]["pre_width"]]
    assert pairs
    assert not any(build["constant_loads"] for build in pairs)
