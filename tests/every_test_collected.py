"""Fails a run of whole folders that has not collected every test function that is written in them.

A test that is no longer found (its file or class renamed, its module skipped, a definition behind a condition) fails
nowhere by itself. `make test` and `make test-lab` load this plugin with `-p tests.every_test_collected`; a run of some
tests by hand does not. Under pytest-xdist every worker collects all tests, and the process that the workers report to compares.
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
        compare([item.nodeid for item in session.items], session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """Compares what a worker has collected; its errors were reported before."""
    if not node.config.pluginmanager.getplugin("terminalreporter").stats.get("error"):
        compare(ids, node.config)


def compare(ids: Sequence[str], config: pytest.Config) -> None:
    """Ends the run if a test is missing."""
    # tests/unit/test_x.py::TestClass::test_name[parameters]
    collected = {(name.partition("::")[0], name.partition("[")[0].rpartition("::")[2]) for name in ids}
    missing = [f"{path}: {name}" for path, name in written_tests(config) if (path, name) not in collected]
    if missing:
        raise pytest.UsageError("these tests are written but not collected:\n  " + "\n  ".join(missing))


def written_tests(config: pytest.Config) -> Iterator[tuple[str, str]]:
    """Path and name of every function in the folders of the run that is named as a test, wherever in its file."""
    root = config.rootpath
    folders = [Path(config.invocation_params.dir, name) for name in config.args]
    assert all(folder.is_dir() for folder in folders), f"{config.args} are not all folders"
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path.relative_to(root).as_posix(), node.name
