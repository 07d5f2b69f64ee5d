"""The front page's commands, as they stand there: on the quickstart's model, after a few of its steps."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from commands import DEADLINE_S

from tests.costly import COSTLY

ROOT = Path(__file__).parents[2]
LISTED = (ROOT / "README.md").read_text(encoding="utf-8").split("these work as they stand")[1].split("```")[1]
COMMANDS = [line for line in LISTED.strip().splitlines() if "# hours" not in line]
FEW_STEPS = ("train.num_steps=2", "optimizer.warmup_steps=0", "evaluation.max_sequences=4", "checkpoint.every_steps=1")


def run(line: str, folder: Path, *more: str) -> None:
    """Run a command of `megamem` as a shell would in a checkout, with its comment."""
    words = [sys.executable, "-m", "megamem", *shlex.split(line, comments=True)[1:], *more]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, f"{line}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"


def test_every_line_is_a_command() -> None:
    assert len(COMMANDS) >= 12
    assert all(re.match(r"megamem [a-z]+ ?", line) for line in COMMANDS)


@COSTLY
def test_the_front_pages_commands_work_as_they_stand(corpus: Path, tmp_path: Path) -> None:
    for name in ("configs", "megamem", "kernels", "parallel", "pretrain", "slurm", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "stdlib").symlink_to(corpus)
    run("megamem train configs/quickstart.yaml --run-dir runs/quickstart", tmp_path, *FEW_STEPS)
    for line in COMMANDS:
        run(line, tmp_path, *(FEW_STEPS if line.startswith("megamem train ") else ()))
