"""Corpora that need no download: Python sources that are on this machine anyway.

They are the same wherever the interpreter and the packages of requirements/lock.txt are the same.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pretrain.errors import DataError

PYTHON_STDLIB = "python-stdlib"
"""Input name of the default corpus: the sources of the running interpreter's standard library."""
PYTHON_PACKAGES = "python-packages"
"""Input name of the larger one: the sources of the packages that this one needs, directly or not."""

_PROJECT = "megamem"
# How this interpreter was built: written by its build, different on every machine, and no source.
_STDLIB_GENERATED_PREFIX = "_sysconfigdata"
_STDLIB_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_PACKAGE_EXCLUDED_FOLDERS = frozenset({"test", "tests", "__pycache__"})


def stdlib_paths() -> list[Path]:
    """The standard library's sources without its tests, sorted.

    Raises:
        DataError: no sources are there.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in root.rglob("*.py")
        if not _STDLIB_EXCLUDED_FOLDERS.intersection(path.relative_to(root).parts)
        and not path.name.startswith(_STDLIB_GENERATED_PREFIX)
    ]
    if not paths:
        raise DataError(
            f"{PYTHON_STDLIB}: {root} holds no Python sources. Install the interpreter's standard library as files."
        )
    return sorted(paths)


def package_paths() -> list[Path]:
    """The needed packages' sources without their tests, package by package in the order of names.

    Packages of extras are left out, so that a development environment has the same corpus as any other.

    Raises:
        DataError: this project is not installed, so nobody knows what it needs, or there are no sources.
    """
    try:
        project = distribution(_PROJECT)
    except PackageNotFoundError as error:
        raise DataError(
            f"{PYTHON_PACKAGES}: {_PROJECT} is not installed, and its packages are not known: pip install -e ."
        ) from error
    needed: dict[str, Distribution] = {}
    _add_needed(project, needed)
    paths = [path for _, package in sorted(needed.items()) for path in sorted(_sources(package))]
    if not paths:
        raise DataError(f"{PYTHON_PACKAGES}: the packages that {_PROJECT} needs hold no Python sources.")
    return paths


INSTALLED: Mapping[str, Callable[[], list[Path]]] = {PYTHON_STDLIB: stdlib_paths, PYTHON_PACKAGES: package_paths}
"""The corpora by input name."""


def _add_needed(package: Distribution, found: dict[str, Distribution]) -> None:
    """Add what a package needs, and what that needs in turn, by name."""
    for requirement in map(Requirement, package.requires or ()):
        name = canonicalize_name(requirement.name)
        # Markers leave out extras, and other systems and versions of Python.
        is_meant = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_meant and name not in found:
            found[name] = distribution(name)
            _add_needed(found[name], found)


def _sources(package: Distribution) -> Iterator[Path]:
    for file in package.files or ():
        if file.suffix == ".py" and not _PACKAGE_EXCLUDED_FOLDERS.intersection(PurePath(file).parts):
            path = Path(str(package.locate_file(file)))
            if path.is_file():
                yield path
