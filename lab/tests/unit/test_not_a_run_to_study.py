"""A configuration or a checkpoint where a study wants a run's folder: it says what to give instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.cli import main


@pytest.mark.parametrize("command", ["probe", "analyse frequency"])
@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("mine.yaml", "is a configuration, and a run's folder is wanted: give what `megamem train mine.yaml` makes"),
        ("run/checkpoints/step_00000003", "is a checkpoint, and a run's folder is wanted: give run, and --step 3"),
    ],
)
def test_what_is_no_run_is_told_from_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    path: str,
    fix: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("name: my run\ntrain: {num_steps: 4}\n")
    Path("run/checkpoints/step_00000003").mkdir(parents=True)
    assert main(["study", *command.split(), path]) == 2
    error = capsys.readouterr().err
    assert error.count("megamem: error:") == 1
    assert f"{path} {fix}" in " ".join(error.split())
