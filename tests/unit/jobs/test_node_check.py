"""Bad nodes, by the reports of their ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm.node_check import Expected, Report, judge
from slurm.profile import NodeCheckConfig

RULES = NodeCheckConfig()
EXPECTED = Expected(num_gpus=2, code="abc")
NODES = ("n1", "n2")
GOOD = [
    Report(node, rank, 2, "", 0.99, "abc" if rank % 2 == 0 else "", "")
    for rank, node in enumerate(("n1", "n1", "n2", "n2"))
]


def found(reports: list[Report], offsets_s: dict[int, float] | None = None) -> dict[str, str]:
    return judge(reports, offsets_s or {}, NODES, 4, EXPECTED, RULES)


def test_good_nodes_are_good() -> None:
    assert found(GOOD, {1: 0.1, 2: -4.9, 3: 4.9}) == {}


@pytest.mark.parametrize(
    ("rank", "change", "said"),
    [
        (3, {"num_gpus": 1}, "a rank sees 1 GPUs of 2"),
        (2, {"gpu_problem": "a GPU cannot be used (no driver)"}, "a GPU cannot be used (no driver)"),
        (3, {"free_gpu_share": 0.5}, "only 50% of a GPU's memory is free"),
        (2, {"code": "def"}, "its code is def, and abc was submitted"),
        (2, {"folder_problem": "/shared cannot be written (Read-only)"}, "/shared cannot be written"),
    ],
)
def test_the_node_of_a_rank_with_a_problem_is_named(rank: int, change: dict[str, object], said: str) -> None:
    reports = [replace(report, **change) if report.rank == rank else report for report in GOOD]  # type: ignore[arg-type]
    bad = found(reports)
    assert list(bad) == ["n2"]
    assert said in bad["n2"]


@pytest.mark.parametrize("offset_s", [6.0, -6.0])
def test_a_clock_that_is_off(offset_s: float) -> None:
    assert found(GOOD, {2: 0.0, 3: offset_s}) == {"n2": f"its clock is {offset_s:+.1f} s off"}


def test_ranks_that_were_not_heard_of() -> None:
    assert found(GOOD[:3]) == {"n2": "1 of 2 ranks were not heard of within 300 s"}
    assert found(GOOD[:2]) == {"n2": "2 of 2 ranks were not heard of within 300 s"}
