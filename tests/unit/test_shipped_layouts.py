"""configs/h100/: files that jobs are submitted with, one for each of the largest models and numbers of GPUs; and the page
that says what they hold and take.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lab.maintenance import check_plan
from lab.maintenance.plan_page import (
    FEWER,
    GPUS,
    MODELS,
    OF_FEW_GPUS,
    PLANS,
    UPDATES,
    Planned,
    against_groups,
    against_mixture,
    fewest,
    markdown_table,
    marks,
    outlook_row,
    rows_of,
)
from pretrain.config.stages import load_config, load_stages
from pretrain.config.updates import keeps_rows
from pretrain.config.validate import validate
from pretrain.planning.costs.hardware import load_hardware
from pretrain.planning.costs.layouts import all_estimates, estimate, recommended
from pretrain.planning.costs.stages import Division
from pretrain.run.preflight import check_gpu_memory
from tests.deadline import launch_within

REPOSITORY = Path(__file__).parents[2]
MODEL_FOLDER = REPOSITORY / "configs" / "ultramemv2"
PATHS = sorted((REPOSITORY / "configs" / "h100").glob("*.yaml"))
PAGE = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
H100 = load_hardware("h100-80g")
LAST = REPOSITORY / "configs" / "h100" / "2.5b_60b_top768_on_512.yaml"


def gpus_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def test_every_model_has_a_file_for_each_number_of_gpus() -> None:
    assert {path.name for path in PATHS} == {f"{Path(file).stem}_on_{n}.yaml" for file in MODELS.values() for n in GPUS}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_all_stages_can_run_on_the_gpus_that_the_file_is_for(path: Path) -> None:
    num_gpus = gpus_of(path)
    of_model = path.name.partition("_on_")[0]
    command = f"plan configs/stages/{of_model}.yaml --gpus {num_gpus} --gpu h100-80g --write configs/h100/{path.name}"
    assert path.read_text(encoding="utf-8").startswith(f"# For {num_gpus} GPUs: megamem {command}\n")
    stages, shipped = load_stages(path), load_stages(REPOSITORY / "configs" / "stages" / f"{of_model}.yaml")
    assert [config.stage.name for config in stages if config.stage is not None] == ["pretrain", "decay", "long"]
    for config, before in zip(stages, shipped, strict=True):
        validate(config, num_gpus, on_this_machine=False)
        check_gpu_memory(config, num_gpus, int(80e9))
        assert estimate(config, num_gpus, H100).fits(H100)
        # Layouts alone differ from the stages that the file is made of.
        assert config.model == before.model
        assert config.stage == before.stage
        assert replace(config.train, micro_batch_size=1, recompute="full") == replace(before.train, micro_batch_size=1)


def test_the_layout_is_the_one_that_plans_recommend() -> None:
    first = load_stages(LAST)[0]
    best = recommended(all_estimates(first, gpus_of(LAST), H100), H100)
    assert best is not None
    assert best.config == first


def test_a_rank_of_it_is_dry_run() -> None:
    config = load_stages(REPOSITORY / "configs" / "h100" / "2.5b_120b_top256_on_64.yaml")[0]
    # As many microbatches as are in flight.
    replicas = 64 // (config.parallel.tensor * config.parallel.pipeline)
    batch = config.parallel.pipeline * replicas * config.train.micro_batch_size
    config = replace(config, train=replace(config.train, global_batch_size=batch))

    def main() -> tuple[float, float, float, float]:
        from pretrain.planning.costs.memory import stage_bytes
        from pretrain.planning.dryrun.rank import dry_run

        (report,), stage = dry_run(config, 64, [0], as_gpu=True), stage_bytes(config, 64)[0]
        return report.held.total, stage.held, report.activation_bytes, stage.activations

    ((held, predicted_held, activations, predicted),) = launch_within(main, 1, timeout_s=280, num_threads=1)
    assert predicted_held == pytest.approx(held, rel=0.02)
    assert predicted == pytest.approx(activations, rel=0.1)


def test_the_page_says_what_is_computed() -> None:
    begin, end = marks(PLANS)
    computed = PAGE.partition(begin)[2].partition(end)[0]
    name, file = list(MODELS.items())[-1]
    config = load_config(MODEL_FOLDER / file)
    found = all_estimates(config, GPUS[-1], H100)
    best = recommended(found, H100)
    assert best is not None
    plan = Planned(GPUS[-1], found, best)
    of_model = computed.partition(f"## UltraMemV2-{name}\n")[2].partition("\n## ")[0]
    for line in markdown_table(against_groups([plan], H100)):
        assert line in of_model
    shown = {cells[1].strip(): cells[-2].strip() for line in of_model.splitlines() if len(cells := line.split("|")) > 3}
    for row in rows_of(config, [plan], H100):
        assert shown[row[0]] == row[1]
    for line in markdown_table(against_mixture(GPUS[-1:], H100)):
        assert line in computed
    assert "| " + " | ".join(outlook_row(GPUS[0], H100)) + " |" in computed


def test_the_page_says_how_few_gpus_are_enough() -> None:
    begin, end = marks(FEWER)
    model = "1.25B/12.5B"
    shown = {line.split("|")[1].strip(): line for line in PAGE.partition(begin)[2].partition(end)[0].splitlines()[1:]}
    assert shown[model] == f"| {model} | " + " | ".join(fewest(model, update, H100) for update in UPDATES) + " |"
    assert {*OF_FEW_GPUS} <= {*shown}


def test_the_page_names_the_files() -> None:
    assert set(re.findall(r"configs/h100/\S+?_on_\d+\.yaml", PAGE)) == {f"configs/h100/{path.name}" for path in PATHS}


def test_check_plan_prints_a_line_for_each_and_ends_with_1_outside_of_the_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lab.maintenance.agreement import Figure

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
