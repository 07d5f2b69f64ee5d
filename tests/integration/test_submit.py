"""Refusals of `megamem submit` before anything is queued, and what it says it would queue. Without Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Megamem, steps

from pretrain.config.stages import read_run
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import starting_checkpoint, starting_point
from slurm import queue
from slurm.job import stages_of
from slurm.profile import load_profile
from slurm.queue import job_of_run
from slurm.records import JobsFolder


def profile(folder: Path, **changes: Any) -> Path:
    """A profile of two ranks on each of two nodes that see this folder."""
    path = folder / "here.yaml"
    content = {"ranks_per_node": 2, "nodes": 2, "shared_paths": ["/"], "runs_path": str(folder / "runs"), **changes}
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_dry_run_prints_the_script_and_leaves_nothing(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    result = megamem("submit", config_file, "--cluster", profile(tmp_path), "--dry-run", "train.micro_batch_size=2")
    assert result.code == 0, result.output
    assert "#SBATCH --nodes=2\n" in result.output
    assert "-m tools.job rank" in result.output
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_a_sweep_prints_both_scripts(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    options = ("--cluster", profile(tmp_path), "--sweep", "optimizer.lr=1e-3,2e-3", "train.micro_batch_size=2")
    result = megamem("submit", config_file, *options, "--dry-run")
    assert result.code == 0, result.output
    assert "#SBATCH --array=0-1\n" in result.output
    assert f"  {tmp_path}/runs/tiny/tiny-lr=2e-3/slurm\n" in result.output
    assert f"records={tmp_path}/runs/tiny/tiny-lr=1e-3/slurm\n" in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "arguments", "code", "said"),
    [
        ({}, ["parallel.tensor=8", "--nodes", "1"], 2, "not a multiple of parallel.tensor 8"),
        ({}, ["train.global_batch_size=6"], 2, "train.global_batch_size is 6"),
        ({}, ["data.datasets.0.path=/nowhere", "train.micro_batch_size=2"], 3, "/nowhere"),
        ({}, ["train.sequence_length=100000000", "train.micro_batch_size=2"], 3, "Lower train.sequence_length"),
        ({"shared_paths": ["/shared"]}, ["train.micro_batch_size=2"], 2, "the run folder is"),
        (
            {"virtual_environment": "/nowhere/venv"},
            ["train.micro_batch_size=2"],
            2,
            "there is no /nowhere/venv/bin/python",
        ),
        (
            {"virtual_environment": "/venv", "shared_paths": ["/tmp"]},
            ["train.micro_batch_size=2"],
            2,
            "virtual_environment",
        ),
        ({}, ["--time", "soon"], 2, "time is 'soon'"),
        ({"min_nodes": 2}, ["--nodes", "1"], 2, "min_nodes is 2, above nodes 1"),
        (
            {"gpus_per_node": 2, "gpu_memory_gb": 1e-5},
            ["train.micro_batch_size=2"],
            2,
            "on 4 ranks, and a GPU has 1e-05 GB",
        ),
        ({}, ["--chain"], 2, "the run has no `stages`"),
        ({}, ["--at-once", "2"], 2, "there is no --sweep"),
        ({}, ["--sweep", "train.micro_batch_size=2,3"], 2, "train.micro_batch_size 3"),
        ({}, ["--sweep", "optimizer.lr=1e-3", "--sweep", "optimizer.lr=2e-3"], 2, "is given 2 times"),
        ({}, ["--nodes", "decay=2"], 2, "only jobs of a --chain have one"),
    ],
)
def test_what_cannot_run_is_refused(
    megamem: Megamem,
    config_file: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    result = megamem("submit", config_file, "--cluster", profile(tmp_path, **changes), "--dry-run", *arguments)
    assert result.code == code, result.output
    assert said in result.output


def test_a_secret_that_others_can_read_is_refused(megamem: Megamem, config_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    here = profile(tmp_path, environment=[{"name": "WANDB_API_KEY", "file": str(file), "reason": "the report"}])
    command = ("submit", config_file, "--cluster", here, "--dry-run", "train.micro_batch_size=2")
    assert f"is to be read from {file}: No such file" in " ".join(megamem(*command).output.split())
    file.touch(0o644)
    refused = megamem(*command)
    assert refused.code == 2
    assert f"chmod 600 {file}" in " ".join(refused.output.split())
    file.chmod(0o600)
    assert megamem(*command).code == 0


def test_another_model_in_the_run_folder_is_refused(
    megamem: Megamem, config_file: Path, saved_run: Path, tmp_path: Path
) -> None:
    options = ("--cluster", profile(tmp_path), "--run-dir", saved_run, "--dry-run", "train.micro_batch_size=2")
    assert megamem("submit", config_file, *options).code == 0
    finished = megamem("submit", config_file, *options, "train.num_steps=6")
    assert finished.code == 2
    assert f"{saved_run} is finished: 6 of 6 steps are done" in " ".join(finished.output.split())
    result = megamem("submit", config_file, *options, "seed=7")
    assert result.code == 4, result.output
    assert "is of another run: seed" in result.output


def test_a_run_goes_on_from_another_ones_checkpoint(
    megamem: Megamem, config_file: Path, saved_run: Path, tmp_path: Path
) -> None:
    """The job's files, and what its ranks make of them, are those of `megamem train --from`."""
    longer = ("train.num_steps=2", "train.micro_batch_size=2", "optimizer.warmup_steps=1")
    options = ("--cluster", profile(tmp_path, nodes=1), "--from", saved_run, *longer)
    dry = megamem("submit", config_file, *options, "--dry-run")
    assert dry.code == 0, dry.output
    here = load_profile(profile(tmp_path, nodes=1))
    start = starting_checkpoint(saved_run, RunFolder(tmp_path / "run"))
    assert start is not None
    stages = read_run(config_file, longer).stages(starting_point(start))
    job = job_of_run(JobsFolder(RunFolder(tmp_path / "run")), stages, here, "here", start=start)
    queue.write(job)
    (stage,) = stages_of(job.records, job.submission)
    assert stage.stage is not None
    assert (stage.stage.steps_before, stage.train.num_steps) == (6, 8)
    for name, words in {"run": (job.records.config,), "own": (config_file, *longer, "--from", saved_run)}.items():
        trained = megamem("train", *words, "--run-dir", tmp_path / name, "--nproc", 2)
        assert trained.code == 0, trained.output
    assert [row["step"] for row in steps(tmp_path / "run")] == [7, 8]
    assert steps(tmp_path / "run") == steps(tmp_path / "own")


def test_the_checkpoint_to_go_on_from_must_be_seen_by_all_nodes(
    megamem: Megamem, config_file: Path, saved_run: Path, tmp_path: Path
) -> None:
    here = profile(tmp_path, shared_paths=[str(tmp_path)])
    result = megamem("submit", config_file, "--cluster", here, "--from", saved_run, "train.micro_batch_size=2")
    assert result.code == 2, result.output
    assert f"--from is {saved_run}" in result.output


def test_a_profile_names_what_is_missing(megamem: Megamem, tmp_path: Path) -> None:
    path = profile(tmp_path, shared_paths=[str(tmp_path / "not here")], virtual_environment=str(tmp_path / "venv"))
    result = megamem("cluster", "check", path)
    assert result.code == 2
    assert f"shared path {tmp_path}/not here: is no folder here" in result.output
    assert "virtual environment" in result.output
    keys = megamem("cluster", "keys")
    assert "min_nodes (int | null): Elastic" in keys.output
