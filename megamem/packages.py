"""Packages of ours that another file hides, as Python takes the first of a name on its path. It imports nothing of ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGES = ("kernels", "megamem", "parallel", "pretrain", "slurm", "tools")


def hidden_packages() -> str:
    """Packages of ours that another file or folder hides, and what to do, in a line; empty if there are none.

    All of them lie beside this one.
    """
    ours = Path(__file__).resolve().parent.parent
    hidden = [f"{place} hides our package {name}" for name in PACKAGES if (place := _place_of(name)) is not None]
    if not hidden:
        return ""
    return (
        f"{'; '.join(hidden)}, which lies in {ours}: rename it, start from another folder, or take its folder out of "
        "PYTHONPATH"
    )


def _place_of(name: str) -> Path | None:
    """Place that a package comes from if it is not ours, or is missing from; None if it is ours."""
    ours = Path(__file__).resolve().parent.parent
    spec = importlib.util.find_spec(name)
    if spec is None:
        return ours / name
    # Without a file: a folder of the name without an `__init__.py`.
    found = Path(spec.origin) if spec.origin else Path(next(iter(spec.submodule_search_locations or ()), "."))
    folder = found.parent if found.name == "__init__.py" else found
    return None if folder.resolve() == ours / name else folder
