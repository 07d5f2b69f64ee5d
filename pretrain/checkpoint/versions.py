"""The packages that a checkpoint was written with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("megamem", "torch", "megatron-core", "numpy", "triton", "transformer-engine")


def package_versions() -> dict[str, str]:
    """Versions of what is installed, and of Python."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
