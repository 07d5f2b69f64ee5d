"""The corpora of sources that are on this machine anyway."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.data import installed
from pretrain.data.files import list_files
from pretrain.data.installed import PYTHON_PACKAGES, PYTHON_STDLIB
from pretrain.errors import DataError


def test_standard_library_is_sources_without_tests():
    files = list_files([PYTHON_STDLIB])
    names = [str(file.path) for file in files]
    assert names == sorted(names)
    assert len(names) > 400
    assert any(name.endswith("json/decoder.py") for name in names)
    assert not any("/test/" in name or "/site-packages/" in name or "/idle_test/" in name for name in names)
    assert all(name.endswith(".py") for name in names)


def install(site: Path, name: str, requires: list[str], files: list[str]) -> None:
    """A package in a folder of packages, as pip leaves it."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {text}" for text in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(file)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages for a project of its own name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "_PROJECT", "project-of-the-test")
    return tmp_path


def test_packages_are_those_that_are_needed_with_what_they_need(project: Path) -> None:
    wanted = ["Zeta_of.the-test>=1", "alpha-of-the-test[more]; python_version >= '3'"]
    unwanted = ["torch; extra == 'gpu'", "not-there-of-the-test; sys_platform == 'win32'"]
    install(project, "project_of_the_test", [*wanted, *unwanted], ["project.py"])
    install(project, "zeta_of_the_test", ["beta-of-the-test"], ["zeta/b.py", "zeta/a.py"])
    # Projects that need each other are taken once.
    install(project, "beta_of_the_test", ["zeta-of-the-test"], ["beta.py", "beta.pyi", "beta/data.json"])
    install(project, "alpha_of_the_test", [], ["alpha/x.py", "alpha/tests/y.py", "alpha/test/z.py", "alpha/testing.py"])
    (project / "zeta" / "b.py").rename(project / "zeta" / "gone.py")
    files = list_files([PYTHON_PACKAGES])
    names = [str(file.path.relative_to(project)) for file in files]
    assert names == ["alpha/testing.py", "alpha/x.py", "beta.py", "zeta/a.py"]


def test_packages_without_sources_are_no_corpus(project: Path) -> None:
    with pytest.raises(DataError, match=r"python-packages: project-of-the-test is not installed.*pip install -e \."):
        list_files([PYTHON_PACKAGES])
    install(project, "project_of_the_test", [], ["project.py"])
    with pytest.raises(DataError, match="the packages that project-of-the-test needs hold no Python sources"):
        list_files([PYTHON_PACKAGES])


def test_this_projects_packages_are_a_large_corpus() -> None:
    files = list_files([PYTHON_PACKAGES])
    assert sum(file.size_bytes for file in files) > 50e6
    folders = [file.path.parts for file in files]
    assert {"torch", "megatron", "sympy"} <= {part for parts in folders for part in parts}
    assert not any({"test", "tests", "hypothesis", "ruff"}.intersection(parts) for parts in folders)
