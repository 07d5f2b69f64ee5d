"""A pytest plugin that records which test runs which line, in this process and in those forked from it, and how long
each test takes.

`tests.mutants.reach` loads it; the folder that it writes into is `$MEGAMEM_REACH`.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

from tests.mutants.operators import PACKAGES

_FOLDER = Path(os.environ["MEGAMEM_REACH"])
# One file per process: a rank keeps the context of the test that forked it.
_COVERAGE = coverage.Coverage(
    data_file=str(_FOLDER / "lines"), data_suffix=True, source=list(PACKAGES), config_file=False
)
# Ranks end by os._exit.
_COVERAGE.set_option("run:patch", ["_exit"])
_SECONDS: dict[str, float] = defaultdict(float)


def pytest_configure(config: pytest.Config) -> None:
    _COVERAGE.start()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _COVERAGE.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _SECONDS[report.nodeid] += report.duration


def pytest_unconfigure(config: pytest.Config) -> None:
    _COVERAGE.stop()
    _COVERAGE.save()
    (_FOLDER / f"seconds.{os.getpid()}.json").write_text(json.dumps(_SECONDS), encoding="utf-8")
