"""`megamem probe`: what a person types, sees, and finds in the run folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import Megamem

ASKED = ("--tasks", "needle,hops", "--lengths", "160,200", "--depths", "0,1", "--samples", 3, "--wrong", 1)


def answers(run: Path, name: str = "probe") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / f"{name}.json").read_text())
    return content


def test_runs_are_asked_on_any_layout_and_drawn_side_by_side(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "before", tmp_path / "after"]
    for run in runs:
        shutil.copytree(saved_run, run)
    result = megamem("probe", runs[0], *ASKED, "--nproc", 1)
    assert result.code == 0, result.output
    first = answers(runs[0])
    assert [(cell["task"], cell["length"], cell["depth"]) for cell in first["cells"]] == [
        (task, length, depth) for length in (160, 200) for task in ("needle", "hops") for depth in (0.0, 1.0)
    ]
    assert all(cell["num_samples"] == 3 and cell["nats"] > 0 for cell in first["cells"])
    assert "exact answers / chosen among 2" in result.output
    assert (runs[0] / "probe.png").read_bytes().startswith(b"\x89PNG")
    result = megamem("probe", *runs, *ASKED, "--nproc", 2, "--name", "both")
    assert result.code == 0, result.output
    assert f"picture: {runs[0] / 'both.png'}" in result.output
    assert [answers(run, "both")["name"] for run in runs] == ["before", "after"]
    for run in runs:
        for cell, wanted in zip(answers(run, "both")["cells"], first["cells"], strict=True):
            assert cell["nats"] == pytest.approx(wanted["nats"], rel=1e-5)
            assert {**cell, "nats": 0} == {**wanted, "nats": 0}


def test_a_stretched_model_answers_otherwise(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved_run, run)
    plain, stretched = (
        megamem("probe", run, *words, "--tasks", "kv", "--lengths", 128, "--samples", 1, "--nproc", 1, "--name", name)
        for name, words in (
            ("plain", ()),
            ("stretched", ("model.rotary_scaling.kind=linear", "model.rotary_scaling.factor=4")),
        )
    )
    assert (plain.code, stretched.code) == (0, 0), stretched.output
    assert answers(run, "stretched")["overrides"] == [
        "model.rotary_scaling.kind=linear",
        "model.rotary_scaling.factor=4",
    ]
    nats = [[cell["nats"] for cell in answers(run, name)["cells"]] for name in ("plain", "stretched")]
    assert nats[0] != nats[1]


def test_what_cannot_be_asked_is_told(megamem: Megamem, saved_run: Path) -> None:
    for words, message in (
        ((saved_run, "--tasks", "needel"), "there is no task 'needel'"),
        ((saved_run, "--lengths", "12,x"), "--lengths is 12,x: give numbers"),
        ((saved_run, "train.sequence_length=4"), "train.sequence_length=4 has no place here"),
        ((saved_run, saved_run), "a run is named twice"),
        (("model.rotary_base=1e5",), "no run is named"),
        ((saved_run, "--lengths", 20, "--nproc", 1), "tokens of this tokenizer, and the length is 20: ask longer"),
    ):
        result = megamem("probe", *words)
        assert result.code == 2, result.output
        assert message in " ".join(result.output.split())
