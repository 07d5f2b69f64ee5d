"""Distributions built as an installation would build them, and Python with them on its path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from megamem.packages import PACKAGES

REPOSITORY = Path(__file__).parents[1]


def run_python(*arguments: object, path: tuple[Path, ...], cwd: Path) -> str:
    """Output of Python with some folders before all others but those that it puts there itself."""
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def copied_sources(copy: Path) -> Path:
    """A copy of what the product's distribution is built from, in an empty folder: a build leaves files in its own."""
    for name in (*PACKAGES, "configs"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "NOTICE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copyfile(REPOSITORY / name, copy / name)
    return copy


def built(how: str, sources: Path, folder: Path) -> Path:
    """A folder with the contents of a wheel (`build_wheel`), or of that of an editable installation (`build_editable`)."""
    code = f"import sys; from setuptools import build_meta; build_meta.{how}(sys.argv[1])"
    run_python("-c", code, folder, path=(), cwd=sources)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()
    return folder
