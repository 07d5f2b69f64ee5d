"""The suite fails when tests go missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

Runner = Callable[[dict[str, str]], subprocess.CompletedProcess[str]]

TWO = "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_a(n): pass\nclass TestB:\n    def test_b(self): pass\n"


# By itself, and spread over workers as `make test` does.
@pytest.fixture(params=[(), ("-p", "xdist.plugin", "-n", "2")], ids=["alone", "workers"])
def run_suite(tmp_path: Path, request: pytest.FixtureRequest) -> Runner:
    """Runs a suite of one good file, and of files of given names and texts."""
    (tmp_path / "tests").mkdir()
    shutil.copy(REPOSITORY / "tests" / "every_test_collected.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_two.py").write_text(TWO, encoding="utf-8")

    def run(files: dict[str, str]) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            (tmp_path / "tests" / name).write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-p", "tests.every_test_collected", "-p", "no:cacheprovider"]
        plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        plain["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        return subprocess.run(
            [*command, *request.param], cwd=tmp_path, env=plain, capture_output=True, text=True, check=False
        )

    return run


MISSING = {
    "check_file.py": "def test_of_file(): pass\n",
    "test_class.py": "class B:\n    def test_of_class(self): pass\n",
    "test_condition.py": "if False:\n    def test_of_condition(): pass\n",
    "test_module.py": "import pytest\npytest.importorskip('nothing_of_this_name')\ndef test_of_module(): pass\n",
}
"""Files with a test that pytest does not find."""


def test_tests_that_are_not_found_fail_the_suite(run_suite: Runner) -> None:
    result = run_suite(MISSING)
    assert result.returncode != 0
    missing = "".join(f"\n  tests/{name}: test_of_{name[:-3].partition('_')[2]}" for name in MISSING)
    assert f"written but not collected:{missing}" in result.stderr + result.stdout


def test_a_suite_that_is_complete_passes(run_suite: Runner) -> None:
    result = run_suite({"helper.py": "def tested(): pass\n"})
    assert result.returncode == 0
    assert "3 passed" in result.stdout


def test_a_file_that_does_not_import_is_its_own_error(run_suite: Runner) -> None:
    result = run_suite({"test_c.py": "import nothing_of_this_name\ndef test_c(): pass\n"})
    assert result.returncode != 0
    assert "nothing_of_this_name" in result.stdout
    assert "not collected" not in result.stderr + result.stdout
