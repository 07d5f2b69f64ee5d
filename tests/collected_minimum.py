"""Fails a whole-suite run that has collected fewer tests than `collected_minimum.txt` says.

A test that is no longer found (a file renamed, an import guarded, a parametrisation that came out empty) fails nowhere by itself. `make test`
loads this plugin with `-p tests.collected_minimum`; a run of some tests by hand does not. After adding tests: `make minimum`. Under pytest-xdist
every worker collects all tests, and the process that the workers report to compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_COLLECTED = pytest.StashKey[int]()
MINIMUM_FILE = Path(__file__).with_name("collected_minimum.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make minimum` uses the option."""
    parser.addoption(
        "--raise-collected-minimum",
        action="store_true",
        help=f"write the number of collected tests to {MINIMUM_FILE.name}, unless it is lower",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Compares where there are no workers; a collection that has errors fails anyway, and is not counted."""
    if not session.testsfailed and not hasattr(session.config, "workerinput"):
        compare(len(session.items), session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """Compares what a worker has collected; its errors were reported before."""
    if not node.config.pluginmanager.getplugin("terminalreporter").stats.get("error"):
        compare(len(ids), node.config)


def compare(collected: int, config: pytest.Config) -> None:
    """Ends the run if tests are missing, and raises the minimum if asked to."""
    minimum = read_minimum(MINIMUM_FILE)
    config.stash[_COLLECTED] = collected
    if collected < minimum:
        raise pytest.UsageError(shortfall(collected, minimum))
    if config.getoption("--raise-collected-minimum") and collected > minimum:
        MINIMUM_FILE.write_text(f"{collected}\n", encoding="utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how the number of tests compares."""
    if _COLLECTED not in config.stash:
        return
    collected, minimum = config.stash[_COLLECTED], read_minimum(MINIMUM_FILE)
    advice = " (`make minimum` raises it)" if collected > minimum else ""
    terminalreporter.write_line(f"{collected} tests collected, at least {minimum} expected{advice}")


def read_minimum(path: Path) -> int:
    """The tracked number."""
    return int(path.read_text(encoding="utf-8"))


def shortfall(collected: int, minimum: int) -> str:
    """The error message."""
    return (
        f"{collected} tests were collected, but there were at least {minimum} before: some are no longer found. If they were removed on purpose, "
        f"write the new number into tests/{MINIMUM_FILE.name}"
    )
