"""A tiny model is taught a few facts in every way, asked for them, and asked for what it knew before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Megamem

from tests.rotation import in_turn


def results_in(folder: Path) -> dict[str, Any]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.rglob("taught.json")}


@in_turn(0)
def test_facts_are_learnt_batch_after_batch_and_lessons_are_kept(
    tmp_path: Path, megamem: Megamem, trained: Path
) -> None:
    ways = ("--ways", "full,all_rows,rows", "--rates", "full=1", "--rates", "all_rows=1", "--rates", "rows=1")
    sizes = ("--facts", 10, "--batches", 2, "--steps", 80, "--rows", 60, "--windows", 4, "--seeds", "2")
    command = ("study", "teach", trained, *ways, *sizes, "--at-once", 2, "--run-dir", tmp_path / "runs")
    result = megamem(*command)
    assert result.code == 0, result.output
    found = results_in(tmp_path / "runs")
    assert found.keys() == {"full_1", "all_rows_1", "rows_1"}
    for each in found.values():
        assert [len(of_stage) for of_stage in each["recall"]] == [1, 2]
        assert len(each["known"]) == 2
    # Nobody guesses a code, which is one of 676.
    full = found["full_1"]
    assert full["recall"][0][0] > 0
    assert full["recall"][1][1] > 0
    assert full["patch_bytes"] is None
    assert 0 < found["rows_1"]["patch_bytes"] < found["all_rows_1"]["patch_bytes"]
    assert found["rows_1"]["known"][-1] < full["known"][-1]
    page = (tmp_path / "runs" / "teaching.md").read_text()
    assert "| run | rows | 1 |" in page
    assert "of the first batch" in page
    assert (tmp_path / "runs" / "teaching.svg").exists()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("taught.json")}
    again = megamem(*command)
    assert again.code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("taught.json")} == written
    assert (tmp_path / "runs" / "teaching.md").read_text() == page


@in_turn(1)
def test_adapters_are_taught_the_same_facts(tmp_path: Path, megamem: Megamem, trained: Path) -> None:
    pytest.importorskip("peft", reason="adapters are its: pip install peft")
    options = ("--ways", "lora", "--rates", "lora=1e-2", "--facts", 4, "--steps", 60, "--windows", 4)
    result = megamem("study", "teach", trained, *options, "--run-dir", tmp_path / "runs")
    assert result.code == 0, result.output
    (found,) = results_in(tmp_path / "runs").values()
    assert found["recall"] == [[1.0]]
    assert found["patch_bytes"] > 0


def test_what_cannot_be_taught_is_refused(tmp_path: Path, megamem: Megamem, trained: Path) -> None:
    for words, said in (
        (("--ways", "full,guess"), "guess is none of full, lora, all_rows, rows, rows_sgd"),
        (("--rates", "rows=0"), "rates are above 0"),
        (("--facts", 3, "--batches", 4), "--facts is 3"),
        ((trained,), "two runs have one name"),
    ):
        refused = megamem("study", "teach", trained, *words, "--run-dir", tmp_path / "runs")
        assert refused.code == 2, refused.output
        assert said in refused.output
        assert not (tmp_path / "runs").exists()
