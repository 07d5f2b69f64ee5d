"""The laboratory beside the product, where both are installed from wheels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.installing import built, copied_sources, run_python

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of both wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = copied_sources(tmp_path_factory.mktemp("sources"))
    shutil.copytree(
        REPOSITORY / "lab", sources / "lab", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    )
    built("build_wheel", sources, folder)
    return built("build_wheel", sources / "lab", folder)


def test_a_wheel_has_every_module_and_no_name_that_others_have(installed: Path) -> None:
    names = {"megamem", "megamem_rooms", "megamem-0.1.0.dist-info", "megamem_lab-0.1.0.dist-info"}
    assert {path.name for path in installed.iterdir()} == names
    folder = REPOSITORY / "lab"
    sources = {
        path.relative_to(folder)
        for path in folder.rglob("*.*")
        if path.is_file()
        and path.suffix in (".py", ".html", ".yaml")
        and not {"tests", "build"} & {*path.relative_to(folder).parts}
    }
    there = {
        path.relative_to(installed / "megamem_rooms/lab") for path in (installed / "megamem_rooms/lab").rglob("*.*")
    }
    assert sources - {Path("setup.py")} == there


def test_it_adds_its_commands(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "lab.py").write_text("raise SystemExit('theirs')")
    shown = run_python("-m", "megamem", "--help", path=(tmp_path, installed), cwd=tmp_path)
    assert shown.index("    gpu-check ") < shown.index("    study ")
    studies = run_python("-m", "megamem", "study", "--help", path=(installed,), cwd=tmp_path)
    order = [studies.index(f"    {name} ") for name in ("compare", "fit", "recall", "probe", "analyse", "bench")]
    assert order == sorted(order)


def test_it_needs_no_installation_in_a_checkout(tmp_path: Path) -> None:
    assert "    compare " in run_python("-m", "lab", "study", "--help", path=(REPOSITORY,), cwd=tmp_path)
