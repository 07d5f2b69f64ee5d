"""A configuration or a checkpoint where a command wants a run's folder: every command says what to give instead."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.cli import main

CONFIG = """\
name: my run
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}
data: {datasets: [{path: data}]}
train: {num_steps: 4}
"""
COMMANDS = [
    "eval PATH",
    "generate PATH --prompt x",
    "serve PATH",
    "replay PATH --step 3",
    "tables PATH --form int8 --output new",
    "plot PATH",
    "report PATH",
    "status PATH",
    "cancel PATH",
    "checkpoint inspect PATH",
    "checkpoint verify PATH",
    "checkpoint diff PATH PATH",
    "checkpoint convert PATH new",
    "patch make PATH PATH --output new.safetensors",
    "patch apply mine.safetensors PATH",
    "patch revert mine.safetensors PATH",
    "patch show mine.safetensors PATH",
    "upscale PATH --output new --blocks 1 --insert solar",
    "train PATH --from PATH --run-dir new data.datasets=null",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    (tmp_path / "mine.safetensors").touch()
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], command: str, path: str) -> str:
    assert main([path if word == "PATH" else word for word in command.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("megamem: error:") == 1, error
    return " ".join(error.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_configuration_is_no_run(capsys: pytest.CaptureFixture[str], command: str) -> None:
    wanted = "mine.yaml is a configuration, and a run's folder is wanted: give "
    assert f"{wanted}what `megamem train mine.yaml` makes, runs/my run or its --run-dir" in said(
        capsys, command, "mine.yaml"
    )
    Path("runs/my run").mkdir(parents=True)
    assert said(capsys, command, "mine.yaml").endswith(f"{wanted}runs/my run")


def test_the_configuration_in_a_runs_folder_names_that(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run/checkpoints").mkdir(parents=True)
    shutil.copy("mine.yaml", "run/config.yaml")
    assert said(capsys, "eval PATH", "run/config.yaml").endswith("a run's folder is wanted: give run")


def test_a_file_that_is_no_configuration_either(capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes.yml").write_text("- some\n- [notes")
    assert "makes, runs/<name of the configuration> or its --run-dir" in said(capsys, "eval PATH", "notes.yml")


@pytest.mark.parametrize("command", ["eval PATH", "generate PATH", "replay PATH --step 3"])
def test_a_checkpoint_is_no_run(capsys: pytest.CaptureFixture[str], command: str) -> None:
    Path("run/checkpoints/step_00000003").mkdir(parents=True)
    assert said(capsys, command, "run/checkpoints/step_00000003").endswith(
        "run/checkpoints/step_00000003 is a checkpoint, and a run's folder is wanted: give run, and --step 3"
    )
