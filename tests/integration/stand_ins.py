"""Stand-ins for packages that need a GPU, found before the packages that are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRANSFORMER_ENGINE = Path(__file__).parent / "stand_in_te"
APEX = Path(__file__).parent / "stand_in_apex"
_CALLED = "called.txt"


def train_with(stand_ins: tuple[Path, ...], run: Path, *arguments: object) -> str:
    """Train where the stand-ins can be imported. Modules imported without them cannot learn of them."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.cli", "train", *map(str, (*arguments, "--run-dir", run))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, stand_ins)), "STAND_IN_LOG": str(run / _CALLED)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def called(run: Path) -> Counter[str]:
    """Calls of the stand-ins by the ranks of a run: modules that were made, functions that were called."""
    return Counter((run / _CALLED).read_text().split())
