"""configs/h100/: files that jobs are submitted with, one for each of the largest models and numbers of GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config.stages import load_stages
from pretrain.config.validate import validate
from pretrain.planning.seconds.hardware import load_hardware
from pretrain.run.preflight import check_gpu_memory
from tests.deadline import launch_within
from tests.rotation import in_turn
from tools.plan.layouts import all_estimates, estimate, recommended

REPOSITORY = Path(__file__).parents[2]
PATHS = sorted((REPOSITORY / "configs" / "h100").glob("*.yaml"))
PAGE = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
H100 = load_hardware("h100-80g")
LAST = REPOSITORY / "configs" / "h100" / "2.5b_60b_top768_on_512.yaml"


def gpus_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def test_every_model_has_a_file_for_each_number_of_gpus() -> None:
    models = ("2.5b_120b_top256", "2.5b_60b_top768")
    assert {path.name for path in PATHS} == {f"{model}_on_{n}.yaml" for model in models for n in (64, 256, 512)}


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


@in_turn(0)
def test_the_layout_is_the_one_that_plans_recommend() -> None:
    first = load_stages(LAST)[0]
    best = recommended(all_estimates(first, gpus_of(LAST), H100), H100)
    assert best is not None
    assert best.config == first


@in_turn(1)
def test_a_rank_of_it_is_dry_run() -> None:
    config = load_stages(REPOSITORY / "configs" / "h100" / "2.5b_120b_top256_on_64.yaml")[0]
    # As many microbatches as are in flight.
    replicas = 64 // (config.parallel.tensor * config.parallel.pipeline)
    batch = config.parallel.pipeline * replicas * config.train.micro_batch_size
    config = replace(config, train=replace(config.train, global_batch_size=batch))

    def main() -> tuple[float, float, float, float]:
        from pretrain.planning.bytes.memory import stage_bytes
        from pretrain.planning.dryrun.rank import dry_run

        (report,), stage = dry_run(config, 64, [0], as_gpu=True), stage_bytes(config, 64)[0]
        return report.held.total, stage.held, report.activation_bytes, stage.activations

    ((held, predicted_held, activations, predicted),) = launch_within(main, 1, timeout_s=280, num_threads=1)
    assert predicted_held == pytest.approx(held, rel=0.02)
    assert predicted == pytest.approx(activations, rel=0.1)


def test_the_page_names_the_files() -> None:
    assert set(re.findall(r"configs/h100/\S+?_on_\d+\.yaml", PAGE)) == {f"configs/h100/{path.name}" for path in PATHS}
