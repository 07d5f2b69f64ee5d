"""The Triton kernels built for GPUs that are not there, at the shapes that shipped layouts leave to a rank, within their
limits; and the defects that these limits are there for, planted."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.kernels.kernel_builds import ALL, BUILT_FOR

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason='Triton is not installed: pip install "megamem[gpu]"'
)
IN_TEST_MORE = pytest.mark.skipif(not ALL, reason="costly: `make test-more` runs it")
REPOSITORY = Path(__file__).parents[3]
_PROCESSES = 2 if ALL else 1
KERNELS = {
    name
    for file in (REPOSITORY / "kernels").glob("*/triton_op.py")
    for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
}
"""Every kernel that a launcher launches."""


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """Findings of all builds, by two processes: one core would still build when all other tests are done."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.kernels.kernel_builds"]

    def build(part: int) -> str:
        words = [*command, str(part), str(_PROCESSES)]
        finished = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    with ThreadPoolExecutor(_PROCESSES) as pool:
        return [json.loads(line) for out in pool.map(build, range(_PROCESSES)) for line in out.splitlines()]


def of(reports: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    found = [report for report in reports if report["what"] == what]
    assert found
    return found


@IN_TEST_MORE
def test_planted_defects_are_found_and_nothing_else(reports: list[dict[str, Any]]) -> None:
    planted = of(reports, "planted")
    assert len(planted) == 9
    for report in planted:
        name = report["launch"].partition("(")[0]
        for wanted in report["wanted"]:
            assert any(wanted in problem and name in problem for problem in report["problems"]), report
        assert report["wanted"] or not report["problems"], report


@IN_TEST_MORE
def test_every_kernel_keeps_its_limits_where_shipped_layouts_launch_it(reports: list[dict[str, Any]]) -> None:
    shipped = of(reports, "shipped")
    assert {report["launch"].partition("(")[0] for report in shipped} == KERNELS
    # What G = 8, 16 and 32 ranks leave of tables of 960 and 320 columns; rows wider than a tile.
    widths = {int(width) for report in shipped for width in re.findall(r"\bW=(\d+)", report["launch"])}
    assert widths >= {120, 40, 60, 20, 30, 10, 2048}
    # Column groups and blocks of the tables that are added up.
    assert {found for report in shipped for found in re.findall(r"\bC=(\d+), W=\d+, B=(\d+)", report["launch"])} >= {
        *(("1", "1"), ("1", "4"), ("2", "1"), ("2", "4"))
    }
    assert len({report["capability"] for report in shipped}) == len(BUILT_FOR)
    broken = [problem for report in shipped for problem in report["problems"]]
    assert not broken, "\n".join(broken)


def test_every_kernel_keeps_its_limits_where_its_numbers_are_ones(reports: list[dict[str, Any]]) -> None:
    """Triton makes a Python number of an argument of 1, which every generated token has."""
    specialised = of(reports, "specialised")
    assert {report["launch"].partition("(")[0] for report in specialised} == KERNELS
    broken = [problem for report in specialised for problem in report["problems"]]
    assert not broken, "\n".join(broken)
