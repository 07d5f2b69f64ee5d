"""The folders of our packages, and how a process finds them before others of their names. It imports nothing of ours."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGES = ("kernels", "megamem", "parallel", "pretrain", "slurm", "tools")
_BESIDE = Path(__file__).resolve().parents[1]
# Built by setup.py, so that an environment has none of the others' names from us.
_INSTALLED = _BESIDE / "megamem_rooms"


def folder_of(package: str) -> Path:
    """Folder of one of our packages: beside this one in a checkout, and in `megamem_rooms` where a wheel was installed."""
    return (_INSTALLED if package != "megamem" and _INSTALLED.is_dir() else _BESIDE) / package


def put_ours_first() -> None:
    """Let this process, and those that it spawns, import our packages before all others of their names.

    In the environment there may be Hugging Face's `kernels`, and on PYTHONPATH anybody's `tools.py`.
    """
    sys.path.insert(0, str(folder_of("tools").parent))
