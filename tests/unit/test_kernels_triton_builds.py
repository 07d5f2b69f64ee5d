"""The Triton kernels compiled for GPUs that are not there: resources, and the width of their loads in the machine code."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from kernels.common.tiles import ACCUMULATE_AHEAD, accumulate_instructions, accumulate_tile
from tests.unit.triton_builds import CAPABILITIES, SHAPES, SHARES, reports_of

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
    gathers, accumulations = (
        {"gather_sum_kernel", "gather_dot_kernel"},
        {
            "segment_accumulate_kernel",
            "add_block_sums_kernel",
        },
    )
    built = {(build["kernel"], build["capability"], json.dumps(build["shape"])) for build in builds}
    num_builds = len(gathers | accumulations) * len(SHAPES) + len(accumulations) * len(SHARES)
    assert len(built) == len(CAPABILITIES) * num_builds
    assert {kernel for kernel, _, _ in built} == gathers | accumulations


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


def test_entries_are_added_up_without_waiting_for_each_other(builds: list[dict[str, Any]]) -> None:
    """Nothing passes between threads, all loads of a step are under way before a row is stored, and a plan knows how
    many instructions an entry takes.
    """
    accumulations = [build for build in builds if build["kernel"] == "segment_accumulate_kernel"]
    assert accumulations
    for build in accumulations:
        names = [name.split(".")[0] for name in build["loop"]]
        assert not {"BAR", "SHFL", "LDS", "STS", "REDUX", "VOTE"} & set(names), build
        # Row, place, coefficient, vector and held row of each entry, and with bins one more.
        assert names[: names.index("STG")].count("LDG") == names.count("LDG") >= 5 * ACCUMULATE_AHEAD, build
        assert names.count("STG") == ACCUMULATE_AHEAD, build
        width = build["shape"]["width"] // build["shape"]["groups"]
        tile = accumulate_tile(width)
        instructions = len(names) * tile.num_warps * tile.column_tiles(width) / (ACCUMULATE_AHEAD * tile.entries)
        assert instructions == pytest.approx(accumulate_instructions(width), rel=0.1), build
