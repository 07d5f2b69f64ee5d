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

Runner = Callable[..., subprocess.CompletedProcess[str]]
# By itself, and spread over workers as `make test` does.
WORKERS = [pytest.param((), id="alone"), pytest.param(("-p", "xdist.plugin", "-n", "2"), id="workers")]


@pytest.fixture
def run_suite(tmp_path: Path) -> Runner:
    """Runs a suite of two tests of which a given number is the minimum."""
    (tmp_path / "tests").mkdir()
    shutil.copy(REPOSITORY / "tests" / "collected_minimum.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_two.py").write_text("def test_a(): pass\ndef test_b(): pass\n", encoding="utf-8")

    def run(minimum: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "tests" / "collected_minimum.txt").write_text(f"{minimum}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-p", "tests.collected_minimum", "-p", "no:cacheprovider"]
        plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        plain["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        return subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=plain, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize("workers", WORKERS)
def test_fewer_than_the_minimum_fail(run_suite: Runner, workers: tuple[str, ...]) -> None:
    result = run_suite(3, *workers)
    assert result.returncode != 0
    assert "2 tests were collected, but there were at least 3 before" in result.stderr + result.stdout


@pytest.mark.parametrize("workers", WORKERS)
def test_enough_pass_and_say_how_to_raise_it(run_suite: Runner, workers: tuple[str, ...]) -> None:
    result = run_suite(1, *workers)
    assert result.returncode == 0
    assert "2 passed" in result.stdout
    assert "2 tests collected, at least 1 expected (`make minimum` raises it)" in result.stdout


@pytest.mark.parametrize("workers", WORKERS)
def test_a_file_that_does_not_import_is_its_own_error(
    run_suite: Runner, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "tests" / "test_broken.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    result = run_suite(3, *workers)
    assert result.returncode != 0
    assert "nothing_of_this_name" in result.stdout
    assert "tests were collected, but there were" not in result.stderr + result.stdout


def test_minimum_is_raised_but_never_lowered(run_suite: Runner, tmp_path: Path) -> None:
    raising = ("--collect-only", "--raise-collected-minimum")
    assert run_suite(1, *raising).returncode == 0
    file = tmp_path / "tests" / "collected_minimum.txt"
    assert file.read_text(encoding="utf-8") == "2\n"
    assert run_suite(3, *raising).returncode != 0
    assert file.read_text(encoding="utf-8") == "3\n"
