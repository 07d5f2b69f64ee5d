"""`make check-plan`: what it prints, and that it tries every model where every axis has two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.maintenance import check_plan
from lab.maintenance.agreement import Figure
from pretrain.config.stages import load_stages
from pretrain.config.updates import keeps_rows
from pretrain.config.validate import validate
from pretrain.planning.counts.pipeline_stages import Division

REPOSITORY = Path(__file__).parents[3]
MODEL_FOLDER = REPOSITORY / "configs" / "ultramemv2"


def test_check_plan_prints_a_line_for_each_and_ends_with_1_outside_of_the_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held, activations = (
        Figure("stage 0, weights", 101.0, 100.0, 0.02),
        Figure("stage 0, activations", 120.0, 100.0, 0.1),
    )
    found = {"good": [held], "bad": [held, activations]}
    paths = [str(MODEL_FOLDER / "227m_1.2b.yaml"), str(REPOSITORY / "configs" / "stages" / "430m_5b.yaml")]
    for which, code in (("good", 0), ("bad", 1)):
        monkeypatch.setattr(check_plan, "compare", lambda *_, which=which, **__: (found[which], []))
        assert check_plan.main(paths) == code
        *lines, in_all, of_held = capsys.readouterr().out.splitlines()[:6]
        assert len(lines) == 4
        assert all(("OUTSIDE stage 0, activations: 120 predicted, 100 counted" in line) == bool(code) for line in lines)
        assert lines[-1].startswith("4/4 ")
        assert "430m_5b.yaml (long)" in lines[-1]
        assert "held   +1.00 %" in lines[0]
        assert in_all.startswith("4 configurations in ")
        assert of_held.split() == ["held", "+1.00", "%", f"{paths[0]}:", "stage", "0,", "weights"]


def test_all_models_that_are_shipped_are_checked_where_every_axis_has_two_ranks() -> None:
    names = check_plan.shipped_models()
    assert len(names) > 70
    assert not [name for name in names if "hardware" in name or "recipe" in name or "base.yaml" in name]
    for name in names:
        for config in load_stages(name):
            fewer = check_plan.with_few_blocks(config)
            assert fewer.model.num_layers <= config.model.num_layers
            few, num_ranks = check_plan.on_few_ranks(fewer)
            validate(few, num_ranks, on_this_machine=False)
            division = Division.of(few, num_ranks)
            parts = few.parallel.memory if keeps_rows(few.optimizer) else division.table_replicas
            assert min(division.replicas, parts) >= 2
            assert division.num_microbatches >= few.parallel.pipeline
