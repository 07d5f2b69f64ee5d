"""Fails a whole-suite run that has not collected every test function that is written in this folder.

A test that is no longer found (its file or class renamed, its module skipped, a definition behind a condition) fails
nowhere by itself. `make test` loads this plugin with `-p tests.every_test_collected`; a run of some tests by hand does
not. Under pytest-xdist every worker collects all tests, and the process that the workers report to compares.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Compares where there are no workers; a collection that has errors fails anyway."""
    if not session.testsfailed and not hasattr(session.config, "workerinput"):
        compare([item.nodeid for item in session.items], session.config.rootpath)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """Compares what a worker has collected; its errors were reported before."""
    if not node.config.pluginmanager.getplugin("terminalreporter").stats.get("error"):
        compare(ids, node.config.rootpath)


def compare(ids: Sequence[str], root: Path) -> None:
    """Ends the run if a test is missing."""
    # tests/unit/test_x.py::TestClass::test_name[parameters]
    collected = {(name.partition("::")[0], name.partition("[")[0].rpartition("::")[2]) for name in ids}
    missing = [f"{path}: {name}" for path, name in written_tests(root) if (path, name) not in collected]
    if missing:
        raise pytest.UsageError("these tests are written but not collected:\n  " + "\n  ".join(missing))


def written_tests(root: Path) -> Iterator[tuple[str, str]]:
    """Path and name of every function in `tests/` that is named as a test, wherever in its file."""
    for path in sorted((root / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path.relative_to(root).as_posix(), node.name
