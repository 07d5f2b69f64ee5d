"""The script that completes words of commands, in bash itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.cli import main

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
COMPLETED = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_megamem
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["--print-completion", "bash"]) == 0
    path = tmp_path / "completion.sh"
    path.write_text(capsys.readouterr().out)
    return path


@needs_bash
@pytest.mark.parametrize(
    ("words", "some"),
    [
        (("tra",), {"train"}),
        (("checkpoint", "con"), {"convert"}),
        (("train", "--nod"), set()),
        (("train", "--np"), {"--nproc"}),
        (("generate", "runs/quickstart", "--temp"), {"--temperature"}),
        (("train", "conf"), {"config.yaml"}),
        (("--print-completion", "z"), {"zsh"}),
    ],
)
def test_words_are_completed(script: Path, tmp_path: Path, words: tuple[str, ...], some: set[str]) -> None:
    (tmp_path / "config.yaml").touch()
    ended = subprocess.run(
        ["bash", "-c", COMPLETED, "bash", script, "megamem", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""
    assert set(ended.stdout.split()) == some


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", shell]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["--print-completion", "fish"]) == 2
