"""A cluster's profile: what is refused, and what is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pretrain.errors import ConfigError
from slurm.profile import ClusterConfig, find_profile, load_profile
from tools.config.describe import describe_fields

GOOD = {"ranks_per_node": 2, "shared_paths": ["/shared"], "runs_path": "/shared/runs"}


def load(folder: Path, **changes: object) -> ClusterConfig:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return load_profile(path)


@pytest.mark.parametrize("name", ["local", "example-h100"])
def test_shipped_profiles_load(name: str) -> None:
    assert load_profile(find_profile(name)).ranks_per_node > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"partitions": "gpu"}, "unknown key partitions: did you mean partition"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0: it must be at least 1"),
        ({"gpus_per_node": 1}, "gpus_per_node is 1 and ranks_per_node 2"),
        ({"gpu_binding": "single"}, "gpu_binding has no effect unless gpus_per_node is above 0"),
        ({"nodes": 2, "min_nodes": 3}, "min_nodes is 3, above nodes 2"),
        ({"time": "two days"}, "time is 'two days'"),
        ({"shared_paths": []}, "shared_paths is empty"),
        ({"sbatch_options": ["--nodes=3"]}, "sbatch_options has '--nodes=3'"),
        ({"sbatch_options": ["-p gpu"]}, "sbatch_options has '-p gpu'"),
        ({"sbatch_options": ["--nodes=3"]}, "--nodes follows from nodes, or --nodes of `megamem submit`: remove it"),
        ({"sbatch_options": ["--exclude=n1"]}, "--exclude follows from excluded_nodes: remove it, and set that"),
        # Slurm takes the first letters of an option for all of it.
        ({"sbatch_options": ["--exclud=n1"]}, "--exclude follows from excluded_nodes"),
        ({"sbatch_options": ["--tasks-per-node=3"]}, "--tasks-per-node follows from ranks_per_node"),
        ({"sbatch_options": ["--gres=gpu:4"]}, "--gres follows from gpus_per_node"),
        ({"sbatch_options": ["--mem-per-cpu=1G"]}, "--mem-per-cpu follows from memory_per_node"),
        ({"sbatch_options": ["--error=x"]}, "--error follows from the attempt's folder"),
        ({"sbatch_options": ["--array=1-3"]}, "--array follows from --sweep"),
        ({"srun_options": ["--ntasks=1"]}, "srun_options has '--ntasks=1', and --ntasks follows from ranks_per_node"),
        ({"srun_options": ["--cpu-bind=none"]}, "--cpu-bind follows from cpu_binding"),
        ({"srun_options": ["--exclude n1"]}, "--exclude follows from excluded_nodes"),
        ({"srun_options": ["--tres-per-task=gres/gpu:1"]}, "--tres-per-task follows from cpus_per_rank"),
        ({"srun_options": ["--test-only"]}, "--test-only follows from what srun is asked"),
        ({"srun_options": ["--vers"]}, "--version follows from what srun is asked"),
        ({"srun_options": ["-n1"]}, "srun_options has '-n1': write long options"),
        ({"excluded_nodes": ["./file"]}, "excluded_nodes has './file'"),
        (
            {"environment": [{"name": "WANDB_API_KEY", "value": "abc", "reason": "x"}]},
            "the value of WANDB_API_KEY would",
        ),
        (
            {"environment": [{"name": "hf_token", "value": "abc", "reason": "x"}]},
            "put it into a file that you alone can",
        ),
        (
            {"environment": [{"name": "PROXY", "value": "http://me:abc@proxy:80", "reason": "x"}]},
            "the value of PROXY would stand in scripts",
        ),
        (
            {"environment": [{"name": "DATA", "value": "s3://data?X-Amz-Signature=abc", "reason": "x"}]},
            "the value of DATA would stand in scripts",
        ),
        (
            {"sbatch_options": ["--comment=http://x/?api_key=abc"]},
            "the value of --comment in sbatch_options would stand",
        ),
        ({"environment": [{"name": "A", "value": "1", "file": "x", "reason": "x"}]}, "A needs either value or file"),
        ({"environment": [{"name": "A", "reason": "x"}]}, "A needs either value or file"),
        ({"environment": [{"name": "A B", "value": "1", "reason": "x"}]}, "name is 'A B'"),
        ({"environment": [{"name": "A", "value": "1", "reason": " "}]}, "say in one line why"),
        ({"environment": [{"name": "A", "value": "1"}]}, "environment.0.reason is missing"),
        ({"container": {"runtime": "docker", "image": "x"}}, "expected one of pyxis, apptainer"),
        ({"check": {"all_reduce_mb": 0}}, "check.all_reduce_mb is 0: it must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, **changes)
    assert said in str(error.value)
    assert "mine.yaml" in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "HUGGING_FACE_HUB_TOKEN", "GITHUB_PAT", "DB_PASS", "DB_PWD", "AUTHTOKEN", "SECRETS"],
)
def test_a_secret_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"the value of {name} would stand in scripts and records") as error:
        load(tmp_path, environment=[{"name": name, "value": "abc", "reason": "x"}])
    assert "abc" not in str(error.value)


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "SLURM_EXPORT_ENV", "records"])
def test_what_the_script_sets_itself_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"name is {name}, which the script or Slurm sets"):
        load(tmp_path, environment=[{"name": name, "value": "0", "reason": "x"}])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_IB_PKEY", "7"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_TOKEN_PATH", "/shared/me/token"),
        ("http_proxy", "http://proxy:80"),
        ("IMAGE", "docker://registry:5000/image@sha256:abc"),
        ("PAGE", "http://x/?monkey=1"),
    ],
)
def test_what_only_resembles_a_secret_is_taken(tmp_path: Path, name: str, value: str) -> None:
    profile = load(tmp_path, environment=[{"name": name, "value": value, "reason": "x"}])
    assert profile.environment[0].value == value


def test_a_profile_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match="example-h100, local"):
        find_profile("h200")


def test_relative_paths_are_of_the_folder_where_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile = load(tmp_path, shared_paths=["."], runs_path="runs", virtual_environment=".venv")
    assert profile.shared_paths == (str(tmp_path),)
    assert profile.runs_path == str(tmp_path / "runs")
    assert profile.virtual_environment == str(tmp_path / ".venv")


def test_every_key_has_help() -> None:
    assert [doc.key for doc in describe_fields(ClusterConfig) if not doc.doc] == []
