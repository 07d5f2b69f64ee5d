"""The batch script: reviewed once, clean by shellcheck, and free of what the profile did not name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.config.schema import RunConfig
from pretrain.run.folder import RunFolder
from slurm.profile import ClusterConfig, ContainerConfig, VariableEntry, find_profile, load_profile
from slurm.records import JobsFolder, Submission
from slurm.script import render

GOLDEN = Path(__file__).parent / "job_of_example_h100.sh"
JOBS = JobsFolder(RunFolder(Path("/shared/research/runs/mine")))
SUBMISSION = Submission(1, "example-h100", 64, 8, "0123456789ab", 900, "2026-01-01T00:00:00+00:00")
PLAIN = ClusterConfig(ranks_per_node=2, shared_paths=("/shared",), runs_path="/shared/runs")
VARIANTS = {
    "plain": PLAIN,
    "virtual environment": replace(PLAIN, virtual_environment="/shared/with space/venv"),
    "modules": replace(PLAIN, modules=("cuda/12.8", "nccl")),
    "pyxis": replace(PLAIN, container=ContainerConfig("pyxis", "/shared/image.sqsh", ("/etc/ib:/etc/ib",))),
    "apptainer": replace(PLAIN, gpus_per_node=2, container=ContainerConfig("apptainer", "/shared/i.sif")),
    "elastic": replace(PLAIN, nodes=4, min_nodes=2),
    "one GPU per rank": replace(PLAIN, gpus_per_node=2, gpu_binding="single"),
    "host file": replace(PLAIN, srun_options=("--distribution=arbitrary",)),
    "secret": replace(PLAIN, environment=(VariableEntry("WANDB_API_KEY", "a reason", file="/shared/it's mine"),)),
    "quotes": replace(PLAIN, environment=(VariableEntry("A", "a reason", "it's $HOME"),)),
}


def rendered(profile: ClusterConfig, config: RunConfig | None = None) -> str:
    return render([config or RunConfig(name="mine")], profile, SUBMISSION, JOBS, time=profile.time)


def test_the_script_of_the_example_is_the_reviewed_one() -> None:
    """Accept a change so: write what this renders into the file, and read the difference."""
    profile = load_profile(find_profile("example-h100"))
    assert rendered(profile) == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("profile", VARIANTS.values(), ids=VARIANTS)
def test_shellcheck_finds_nothing(profile: ClusterConfig) -> None:
    if shutil.which("shellcheck") is None:
        message = "shellcheck is not installed (apt-get install shellcheck)"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    # The excluded one: that a dollar in a value stays one, which is meant.
    result = subprocess.run(
        ["shellcheck", "--exclude=SC2016", "-"],
        input=rendered(profile),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("profile", VARIANTS.values(), ids=VARIANTS)
def test_every_path_is_of_the_profile_the_run_or_the_system(profile: ClusterConfig) -> None:
    paths = re.findall(r"""(?:^|[\s='"(,:])(/[^\s'",:;)]*)""", rendered(profile))
    named = (
        *("/shared", "/etc/ib", "/tmp", "/megamem-$UID"),
        *("/bin/bash", "/dev/null", "/etc/profile"),
    )
    assert paths
    assert [path for path in paths if not path.startswith(named)] == []
    assert str(Path.home()) + "/" not in rendered(profile)


def test_variables_are_quoted_and_say_why() -> None:
    assert "export A='it'\"'\"'s $HOME'  # a reason" in rendered(VARIANTS["quotes"])


@pytest.mark.parametrize(
    ("before", "said", "threads"),
    [
        ({}, None, "12"),
        ({"OMP_NUM_THREADS": ""}, None, "12"),
        ({"OMP_NUM_THREADS": "3"}, None, "3"),
        ({"OMP_NUM_THREADS": "3"}, "5", "5"),
    ],
)
def test_threads_are_the_cores_of_a_rank_unless_somebody_says_others(
    before: dict[str, str], said: str | None, threads: str
) -> None:
    """The profile, before what a module or the site set."""
    own = () if said is None else (VariableEntry("OMP_NUM_THREADS", "tried", said),)
    lines = rendered(replace(PLAIN, cpus_per_rank=12, environment=own)).splitlines()
    (line,) = (line for line in lines if "OMP_NUM_THREADS=" in line)
    told = subprocess.run(
        ["bash", "-uc", f"{line}\nprintenv OMP_NUM_THREADS"],
        env={**before, "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout.strip() == threads


def test_what_a_variant_changes() -> None:
    assert "#SBATCH --nodes=64\n" in rendered(PLAIN)
    assert "#SBATCH --no-kill\n" in rendered(VARIANTS["elastic"])
    spare = rendered(replace(PLAIN, spare_nodes=2))
    assert "#SBATCH --nodes=66\n" in spare
    assert "#SBATCH --no-kill\n" in spare
    assert '--nodelist="$node_list"' in spare
    assert "--no-kill" not in rendered(PLAIN)
    assert "module load cuda/12.8 nccl || exit" in rendered(VARIANTS["modules"])
    assert "--gpus-per-task=1" in rendered(VARIANTS["one GPU per rank"])
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in rendered(VARIANTS["one GPU per rank"])
    assert "apptainer exec --nv --bind '/shared,/tmp' /shared/i.sif python3" in rendered(VARIANTS["apptainer"])
    assert "--container-image=/shared/image.sqsh" in rendered(VARIANTS["pyxis"])


def test_what_the_layout_needs_is_set_before_python_starts() -> None:
    gpus = VARIANTS["one GPU per rank"]
    config = RunConfig()
    config = replace(
        config, parallel=replace(config.parallel, tensor=2), train=replace(config.train, deterministic=True)
    )
    script = rendered(gpus, config)
    start = script.index("-m tools.job rank")
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS=1", "CUBLAS_WORKSPACE_CONFIG=:4096:8", "PYTORCH_CUDA_ALLOC_CONF"):
        assert script.index(f"export {name}") < start
    own = replace(gpus, environment=(VariableEntry("CUDA_DEVICE_MAX_CONNECTIONS", "tried", "8"),))
    assert rendered(own, config).count("CUDA_DEVICE_MAX_CONNECTIONS=") == 1
    model = replace(config.model, memory=UltraMemV2Config())
    split = replace(config, model=model, parallel=replace(config.parallel, memory=2))
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32 " in rendered(gpus, split)


# Keys that no line of the script says: what they do is held elsewhere.
NOT_IN_THE_SCRIPT = {"runs_path", "lead_s", "check", "retry", "nodes", "gpu_memory_gb"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ranks_per_node", 1),
        ("shared_paths", ("/shared", "/more")),
        ("scratch_path", "/scratch"),
        ("virtual_environment", "/shared/venv"),
        ("modules", ("cuda",)),
        ("container", ContainerConfig("apptainer", "i.sif")),
        ("environment", (VariableEntry("A", "why", "1"),)),
        ("partition", "gpu"),
        ("account", "us"),
        ("qos", "high"),
        ("min_nodes", 1),
        ("spare_nodes", 1),
        ("time", "5"),
        ("gpus_per_node", 4),
        ("gpu_binding", "single"),
        ("cpus_per_rank", 3),
        ("cpu_binding", "none"),
        ("memory_per_node", "5G"),
        ("exclusive", True),
        ("excluded_nodes", ("n3",)),
        ("sbatch_options", ("--constraint=ib",)),
        ("srun_options", ("--mpi=none",)),
    ],
)
def test_every_key_changes_the_script(key: str, value: object) -> None:
    before = replace(VARIANTS["apptainer"], gpu_binding="all")
    after = replace(before, **{key: value})
    assert rendered(after) != rendered(before)


def test_no_key_is_forgotten() -> None:
    marks = test_every_key_changes_the_script.pytestmark  # type: ignore[attr-defined]
    tried = {case[0] for case in marks[0].args[1]}
    assert tried | NOT_IN_THE_SCRIPT == set(ClusterConfig.__dataclass_fields__)
