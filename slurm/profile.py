"""A cluster, and how runs use it: `configs/clusters/*.yaml`. The docstring under a field is its help text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Le
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megamem.config.base import Config, EffectiveWhen
from pretrain.config.loader import load_as
from pretrain.errors import ConfigError
from slurm.quoting import refuse_unfit

PROFILES = Path("configs") / "clusters"
_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}", re.ASCII)
_SECRET = re.compile(
    r"(.*_)?(KEY|PAT|PASS|PWD)|.*((API|ACCESS|PRIVATE)KEY|TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE)", re.IGNORECASE
)
# In a URL: a password before the host, or a value that opens what it names.
_SECRET_IN_URL = re.compile(
    r"://[^/@:\s]*:[^/@\s]+@|[?&]([\w.-]*[_.-])?(apikey|key|token|secret|password|passwd|signature|sig)=[^&\s]",
    re.IGNORECASE,
)
# Set by the script, or by Slurm for it: another value would take it from the ranks, or from the script itself.
_OWN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_EXPORT_ENV", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
    *("records", "asked", "ranks", "timer"),
)
# Where ranks are and what they share follows from these keys: in the script, in the checks, and in the ranks themselves.
_LAYOUT = {
    **dict.fromkeys(("nodes", "nodefile", "use-min-nodes", "spread-job"), "nodes, or --nodes of `megamem submit`"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-core"), "ranks_per_node"),
    **dict.fromkeys(("ntasks-per-socket", "ntasks-per-gpu", "overcommit"), "ranks_per_node"),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), "cpus_per_rank"),
    **dict.fromkeys(
        ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres"), "gpus_per_node and gpu_binding"
    ),
    "tres-per-task": "cpus_per_rank and gpu_binding",
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), "memory_per_node"),
    **dict.fromkeys(("exclusive", "oversubscribe"), "exclusive"),
    "exclude": "excluded_nodes",
    "export": "environment",
    "export-file": "environment",
    "chdir": "the copy of the code",
    "signal": "lead_s",
    "no-kill": "min_nodes",
    "time": "time, or --time of `megamem submit`",
    "input": "nothing",
    "output": "the attempt's folder",
    "error": "the attempt's folder",
    "open-mode": "the attempt's folder",
}
# Options that the script sets itself, with what sets them: a second one would win or lose in silence.
_OWN_OF_SBATCH = {
    **_LAYOUT,
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time-min": "time",
    "job-name": "name of the configuration",
    "array": "--sweep of `megamem submit`",
    "dependency": "--chain of `megamem submit`",
    "kill-on-invalid-dep": "--chain of `megamem submit`",
    **dict.fromkeys(("requeue", "no-requeue", "begin", "hold"), "the rule of what follows an attempt (retry)"),
    **dict.fromkeys(("wrap", "get-user-env"), "the script"),
    **dict.fromkeys(
        ("parsable", "test-only", "wait", "quiet", "verbose", "help", "usage", "version"), "what it is asked"
    ),
    **dict.fromkeys(("clusters", "uid", "gid"), "whoever submits, where he does"),
}
_OWN_OF_SRUN = {
    **_LAYOUT,
    "cpu-bind": "cpu_binding",
    **dict.fromkeys(("kill-on-bad-exit", "wait", "label", "unbuffered", "pty", "multi-prog"), "how ranks are watched"),
    **dict.fromkeys(("nodelist", "relative", "jobid", "overlap", "immediate"), "the job's nodes that are alive"),
    **dict.fromkeys(("container-image", "container-mounts", "container-workdir"), "container"),
    # With these it starts nothing, and ends as after all steps.
    **dict.fromkeys(("test-only", "help", "usage", "version", "hold", "no-allocate"), "what srun is asked"),
}


@dataclass(frozen=True)
class ContainerConfig(Config):
    """The image in which ranks run."""

    runtime: Literal["pyxis", "apptainer"]
    """pyxis: srun's plugin for Enroot; apptainer: `apptainer exec` around every rank."""
    image: str
    """A file that all nodes see, or what the runtime can fetch."""
    mounts: tuple[str, ...] = ()
    """Folders of the node, as source:target, besides shared_paths and scratch_path, which are always mounted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unfit(self)
        for mount in self.mounts:
            if "," in mount:
                raise ValueError(f"mounts has {mount!r}, and the runtime takes what follows a comma for another one")


@dataclass(frozen=True)
class VariableEntry(Config):
    """A variable of the ranks' environment."""

    name: str
    """The variable."""
    reason: str
    """Reason for setting it; stands beside it in the script."""
    value: str | None = None
    """Its value; not of a secret, as scripts and records are kept."""
    file: str | None = None
    """File whose content is the value, read by the job when it starts: for keys and passwords. All nodes see it, and nobody
    else may read it (chmod 600)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unfit(self)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.name):
            raise ValueError(f"name is {self.name!r}, which is no name of an environment variable")
        if self.name in _OWN_VARIABLES:
            raise ValueError(f"name is {self.name}, which the script or Slurm sets: remove the entry")
        if not self.reason.strip():
            raise ValueError(f"reason of {self.name} is {self.reason!r}: say in one line why it is set")
        if (self.value is None) == (self.file is None):
            raise ValueError(f"{self.name} needs either value or file")
        if self.value and (_SECRET.fullmatch(self.name) or _SECRET_IN_URL.search(self.value)):
            raise ValueError(
                f"the value of {self.name} would stand in scripts and records: put it into a file that you alone can read "
                "(chmod 600), below shared_paths, and name that as file"
            )


@dataclass(frozen=True)
class NodeCheckConfig(Config):
    """Checks of every node before a run trains on it."""

    max_clock_skew_s: PositiveFloat = 5.0
    """Seconds by which a node's clock may differ from that of rank 0."""
    min_free_gpu_share: Annotated[PositiveFloat, Le(1)] = 0.9
    """Share of a GPU's memory that must be free before the run uses it."""
    all_reduce_mb: PositiveInt = 64
    """MB that each rank gives to the all-reduce whose bandwidth is measured."""
    timeout_s: PositiveFloat = 300.0
    """Seconds in which every rank must have reported; the nodes of those that have not are named."""


@dataclass(frozen=True)
class RetryConfig(Config):
    """Retries after a failed attempt."""

    starts_without_checkpoint: PositiveInt = 2
    """Attempts in a row that end without a new checkpoint, after which the run stops."""
    backoff_s: NonNegativeFloat = 60.0
    """Seconds before the start that follows the second failure in a row; doubled for each one after it."""
    max_backoff_s: NonNegativeFloat = 3600.0
    """Longest such wait, in seconds."""


@dataclass(frozen=True)
class ClusterConfig(Config):
    """A cluster, and how runs use it."""

    ranks_per_node: PositiveInt
    """Ranks, and Slurm tasks, per node: one per GPU."""
    shared_paths: tuple[str, ...]
    """Folders that every node sees under the same name. Runs and data sets must lie below one of them; relative to the
    folder in which `megamem submit` is typed."""
    runs_path: str
    """Folder for runs that are submitted without --run-dir."""
    scratch_path: str = "/tmp"
    """Folder on a disk of the node: caches of compiled kernels."""
    virtual_environment: str | None = None
    """Folder of the virtual environment in which ranks run, seen by all nodes; null: the python3 of modules or
    container."""
    modules: tuple[str, ...] = ()
    """Environment modules to load, in this order."""
    container: ContainerConfig | None = None
    """The image in which ranks run; null: none."""
    environment: tuple[VariableEntry, ...] = ()
    """Variables of the ranks, for NCCL and the network most of all. Nothing else of the submitting shell reaches them."""
    partition: str | None = None
    """Partition; null: the cluster's default."""
    account: str | None = None
    """Account that is charged; null: the user's default."""
    qos: str | None = None
    """Quality of service; null: the default."""
    nodes: PositiveInt = 1
    """Nodes of a run that is submitted without --nodes."""
    min_nodes: PositiveInt | None = None
    """Elastic: fewest nodes on which a run goes on at once when others of its job are gone; the global batch stays. null:
    it is requeued, and waits until all nodes are there."""
    spare_nodes: NonNegativeInt = 0
    """Nodes that a job holds besides, idle: one of them takes the place of a node that dies or is found bad, at once."""
    time: str = "1-00:00:00"
    """Time limit of an attempt, as Slurm has it: days-hours:minutes:seconds."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs per node, of which every rank must find one; 0: ranks use CPUs."""
    gpu_memory_gb: Annotated[
        PositiveFloat | None, EffectiveWhen(lambda c: c.gpus_per_node > 0, "gpus_per_node is above 0")
    ] = None
    """Memory of a GPU: `submit` refuses a run whose weights, gradients and optimizer's state alone need more. null: the
    ranks find out."""
    gpu_binding: Annotated[
        Literal["all", "single"], EffectiveWhen(lambda c: c.gpus_per_node > 0, "gpus_per_node is above 0")
    ] = "all"
    """all: a rank sees the GPUs of its node and uses that of its number, so that NCCL can use peer memory; single: it
    sees its own alone."""
    cpus_per_rank: PositiveInt = 1
    """CPU cores per rank: OpenMP threads, and what a rank is bound to."""
    cpu_binding: Literal["none", "cores"] = "cores"
    """cores: srun binds each rank to its cores; none: it does not."""
    memory_per_node: str | None = None
    """Memory as sbatch --mem has it (0: all of the node); null: the cluster's default."""
    exclusive: bool = False
    """Use each node for one job alone."""
    excluded_nodes: tuple[str, ...] = ()
    """Nodes that runs must not have, each by name or in Slurm's short form, as in n[01-03]. Those that a run finds bad are
    left out besides."""
    sbatch_options: tuple[str, ...] = ()
    """More options of sbatch, as in --constraint=ib."""
    srun_options: tuple[str, ...] = ()
    """More options of srun for the ranks, as in --distribution=arbitrary."""
    lead_s: PositiveInt = 600
    """Seconds before the time limit at which a run is told to save, as long as none of its saves was measured; and the
    least afterwards."""
    check: NodeCheckConfig | None = field(default_factory=NodeCheckConfig)
    """Checks of every node before a run trains; null: none."""
    retry: RetryConfig = field(default_factory=RetryConfig)
    """Retries after a failed attempt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unfit(self)
        if self.gpus_per_node and self.gpus_per_node < self.ranks_per_node:
            raise ValueError(
                f"gpus_per_node is {self.gpus_per_node} and ranks_per_node {self.ranks_per_node}: a rank needs a GPU of "
                "its own, so lower ranks_per_node, or set gpus_per_node to 0 for ranks on CPUs"
            )
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes is {self.min_nodes}, above nodes {self.nodes}: lower it")
        if not _TIME.fullmatch(self.time):
            raise ValueError(f"time is {self.time!r}: write days-hours:minutes:seconds, as in 1-12:00:00, or minutes")
        if not self.shared_paths:
            raise ValueError("shared_paths is empty: name a folder that every node sees, below which runs and data lie")
        for path in (*self.shared_paths, self.scratch_path) if self.container is not None else ():
            if "," in path or ":" in path:
                raise ValueError(
                    f"shared_paths and scratch_path are mounted in the container, whose runtime splits {path!r} at its "
                    "commas and colons: use a folder of another name"
                )
        _refuse_own("sbatch_options", self.sbatch_options, _OWN_OF_SBATCH)
        _refuse_own("srun_options", self.srun_options, _OWN_OF_SRUN)
        for node in self.excluded_nodes:
            if not re.fullmatch(r"[A-Za-z0-9._-]+(\[[0-9,-]+\][A-Za-z0-9._-]*)*", node):
                raise ValueError(
                    f"excluded_nodes has {node!r}: write names of nodes, or Slurm's short form as in n[01-03]"
                )

    @property
    def outlives_nodes(self) -> bool:
        """True if a job goes on when some of its nodes are gone."""
        return self.min_nodes is not None or self.spare_nodes > 0


def _refuse_own(key: str, options: Sequence[str], own: Mapping[str, str]) -> None:
    """Refuse options of Slurm that are another way of saying what the script says already.

    Raises:
        ValueError: an option says what the script says; the message names what sets it.
    """
    for option in options:
        name = re.split(r"[=\s]", option.removeprefix("--"), maxsplit=1)[0]
        if _SECRET_IN_URL.search(option):
            raise ValueError(f"the value of --{name} in {key} would stand in scripts and records: leave the secret out")
        if not option.startswith("--") or not name:
            raise ValueError(f"{key} has {option!r}: write long options, as in --name=value")
        # Slurm takes the first letters of an option for all of it.
        meant = name if name in own else next((ours for ours in own if ours.startswith(name)), None)
        if meant is not None:
            raise ValueError(f"{key} has {option!r}, and --{meant} follows from {own[meant]}: remove it, and set that")


def find_profile(name: str) -> Path:
    """The file of a profile: one of `configs/clusters` by name, or a path.

    Raises:
        ConfigError: no profile has the name; the message names those that there are.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    for folder in (PROFILES, Path(__file__).parents[1] / PROFILES):
        if (found := folder / f"{name}.yaml").exists():
            return found
    there_are = sorted(found.stem for found in (Path(__file__).parents[1] / PROFILES).glob("*.yaml"))
    raise ConfigError(
        f"there is no cluster profile {name}: give the path of a YAML file, or one of {', '.join(there_are) or 'none'}"
    )


def load_profile(path: Path) -> ClusterConfig:
    """A profile, with its paths made absolute.

    Raises:
        ConfigError: the profile has problems; the message names key, value, line and fix of every one.
    """
    profile = load_as(ClusterConfig, path)
    named: dict[str, Any] = {
        "shared_paths": tuple(map(_absolute, profile.shared_paths)),
        "runs_path": _absolute(profile.runs_path),
    }
    named["environment"] = tuple(
        entry if entry.file is None else replace(entry, file=_absolute(entry.file)) for entry in profile.environment
    )
    if profile.virtual_environment is not None:
        named["virtual_environment"] = _absolute(profile.virtual_environment)
    try:
        return replace(profile, **named)
    except ValueError as error:
        raise ConfigError(f"{path}, read in {Path.cwd()}: {error}") from error


def _absolute(path: str) -> str:
    # Not resolved: on nodes a link may lead elsewhere.
    return str(Path(path).expanduser().absolute())
