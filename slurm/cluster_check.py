"""Search for what a profile names and this machine does not have."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm.commands import SlurmError, run_command
from slurm.profile import ClusterConfig

_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")


@dataclass(frozen=True)
class ClusterCheck:
    """One thing that was looked for.

    Attributes:
        what: name of the thing, in words.
        problem: reason why the profile cannot work here; empty if the thing is there.
    """

    what: str
    problem: str = ""


def check_cluster(profile: ClusterConfig) -> list[ClusterCheck]:
    """Look for everything that a profile names, as far as this machine can tell."""
    commands = [ClusterCheck(f"command {name}", "" if shutil.which(name) else "is not installed") for name in _COMMANDS]
    findings = [*commands, *_paths(profile), *_tools(profile)]
    if not any(finding.problem for finding in commands):
        findings += _partition(profile)
        findings += _account(profile)
    return findings


def _paths(profile: ClusterConfig) -> Iterator[ClusterCheck]:
    for path in profile.shared_paths:
        yield ClusterCheck(f"shared path {path}", _why_no_folder(Path(path)))
    runs = Path(profile.runs_path)
    if not any(runs.is_relative_to(shared) for shared in profile.shared_paths):
        yield ClusterCheck(f"runs_path {runs}", "lies in none of shared_paths, so nodes may not see it")
    if profile.virtual_environment is not None and profile.container is None:
        python = Path(profile.virtual_environment) / "bin" / "python"
        yield ClusterCheck(
            f"virtual environment {profile.virtual_environment}", "" if python.exists() else f"has no {python}"
        )


def _why_no_folder(path: Path) -> str:
    if not path.is_dir():
        return "is no folder here"
    return "" if os.access(path, os.W_OK | os.X_OK) else "cannot be written"


def _tools(profile: ClusterConfig) -> Iterator[ClusterCheck]:
    container = profile.container
    if container is not None and container.runtime == "apptainer":
        yield ClusterCheck("command apptainer", "" if shutil.which("apptainer") else "is not installed here")
    if container is not None and container.runtime == "pyxis" and shutil.which("srun"):
        knows = "--container-image" in run_command("srun", "--help")
        yield ClusterCheck("srun's plugin Pyxis", "" if knows else "is not installed: srun has no --container-image")
    if container is not None and "/" in container.image and "://" not in container.image and "#" not in container.image:
        yield ClusterCheck(f"image {container.image}", "" if Path(container.image).exists() else "is not there")
    if profile.modules and "MODULESHOME" not in os.environ and "LMOD_CMD" not in os.environ:
        yield ClusterCheck("environment modules", "are not set up in this shell")


def _partition(profile: ClusterConfig) -> Iterator[ClusterCheck]:
    """The partition, and whether its nodes have what the profile asks for."""
    try:
        lines = run_command("sinfo", "-h", "-o", "%R|%D|%c|%G|%l").splitlines()
    except SlurmError as error:
        yield ClusterCheck("the controller", str(error))
        return
    rows = [line.split("|") for line in lines]
    names = sorted({row[0] for row in rows})
    if profile.partition is not None:
        known = profile.partition in names
        yield ClusterCheck(
            f"partition {profile.partition}", "" if known else f"is not there: there are {', '.join(names)}"
        )
        rows = [row for row in rows if row[0] == profile.partition]
    if not rows:
        return
    most_nodes = sum(int(row[1]) for row in rows)
    yield ClusterCheck(
        f"{profile.nodes + profile.spare_nodes} nodes",
        "" if most_nodes >= profile.nodes + profile.spare_nodes else f"are more than the {most_nodes} that there are",
    )
    needed = profile.cpus_per_rank * profile.ranks_per_node
    most_cpus = max(int(row[2].rstrip("+")) for row in rows)
    yield ClusterCheck(
        f"{needed} cores per node", "" if most_cpus >= needed else f"are more than the {most_cpus} of any node"
    )
    if profile.gpus_per_node:
        has_gpus = any("gpu" in row[3] for row in rows)
        yield ClusterCheck(
            f"{profile.gpus_per_node} GPUs per node", "" if has_gpus else "are not there: no node has any"
        )


def _account(profile: ClusterConfig) -> Iterator[ClusterCheck]:
    """Ask Slurm if it would take such a job: it knows accounts, qualities of service, limits and features best."""
    asked = {
        "account": profile.account,
        "qos": profile.qos,
        "partition": profile.partition,
        "time": profile.time,
        "nodes": profile.nodes + profile.spare_nodes,
        "ntasks-per-node": profile.ranks_per_node,
        "cpus-per-task": profile.cpus_per_rank,
        "gpus-per-node": profile.gpus_per_node or None,
        "mem": profile.memory_per_node,
    }
    options = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    try:
        run_command("sbatch", "--test-only", *options, *profile.sbatch_options, "--wrap=true")
    except SlurmError as error:
        yield ClusterCheck("a job of this profile", f"would be refused: {str(error).splitlines()[-1]}")
    else:
        yield ClusterCheck("a job of this profile")
