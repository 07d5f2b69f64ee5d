"""Which rank is this process? Read from the environment that torchrun, Slurm's srun or our own launcher left behind.

A command that may be started by any of the three asks `current_ranks()` once, before it touches a process group: None means that nobody
started ranks yet and the command starts its own (`parallel.launch`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RENDEZVOUS_VARIABLE = "MEGAMEM_RENDEZVOUS"

Source = Literal["torchrun", "slurm", "megamem"]

# Step ids from here on are Slurm's own (batch script, interactive shell, extern): they hold a shell, not ranks.
_FIRST_RESERVED_STEP_ID = 0xFFFFFFF0

# Below Linux's ephemeral range (32768 and up), above the ports that services register.
_FIRST_PORT = 20000
_NUM_PORTS = 12000


@dataclass(frozen=True)
class RankEnvironment:
    """Where one process stands among the ranks of a job, and how the ranks find each other."""

    rank: int
    """Number of this process in the job, from 0."""
    world_size: int
    """Number of processes in the job."""
    local_rank: int
    """Number of this process on its machine, from 0: the index of its GPU."""
    local_world_size: int
    """Number of the job's processes on this machine."""
    init_method: str
    """URL for `torch.distributed.init_process_group(init_method=..., rank=..., world_size=...)`."""
    source: Source
    """Who started the ranks."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            names = _NAMES[self.source]
            raise ValueError(
                f"{names.rank}={self.rank} is not a rank of {names.world_size}={self.world_size}: ranks run from 0 to "
                f"{names.world_size} - 1; start every process with torchrun or srun, which set both"
            )
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            names = _NAMES[self.source]
            raise ValueError(
                f"{names.local_rank}={self.local_rank} does not fit {self.local_world_size} local of {self.world_size} ranks: it "
                f"counts the processes of this machine from 0; correct {names.local_rank} or {names.local_world_size}"
            )


@dataclass(frozen=True)
class _VariableNames:
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_TORCHRUN_NAMES = _VariableNames("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM_NAMES = _VariableNames("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_NAMES: Mapping[Source, _VariableNames] = {
    "torchrun": _TORCHRUN_NAMES,
    "megamem": _TORCHRUN_NAMES,
    "slurm": _SLURM_NAMES,
}


def current_ranks(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return this process's place among ranks that were already started, or None when nobody started any.

    Our own launcher is looked for first, then torchrun (`RANK`), then a Slurm job step (`srun`): torchrun inside srun and our launcher
    inside either inherit the outer variables, and the innermost one is meant. An allocation without `srun` (`salloc`, a batch script) and a
    step of a single task (`srun --pty bash`) are not ranks.

    Args:
        environ: the environment to read; the process's own by default.

    Raises:
        ValueError: the variables contradict each other, or one is missing or not a number. The message names it and the fix.
    """
    environ = os.environ if environ is None else environ
    if RENDEZVOUS_VARIABLE in environ:
        return _from_variables(environ, environ[RENDEZVOUS_VARIABLE], "megamem")
    if "RANK" in environ:
        return _from_torchrun(environ)
    if _is_slurm_step(environ):
        return _from_slurm(environ)
    if environ.get("WORLD_SIZE", "1") != "1" and "SLURM_JOB_ID" not in environ:
        raise ValueError(
            f"WORLD_SIZE={environ['WORLD_SIZE']!r} is set but RANK is not: unset WORLD_SIZE to start local ranks, or start with torchrun, "
            "which sets both"
        )
    return None


def _from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ValueError(
                f"RANK={environ['RANK']!r} is set but {name} is not: set {name} to the host and port of rank 0, start with torchrun, "
                "which sets them, or unset RANK to start local ranks"
            )
    _integer(environ, "MASTER_PORT")
    # Not tcp://: torchrun's agent already serves this port, and env:// knows it.
    return _from_variables(environ, "env://", "torchrun")


def _from_variables(environ: Mapping[str, str], init_method: str, source: Source) -> RankEnvironment:
    world_size = _integer(environ, "WORLD_SIZE")
    return RankEnvironment(
        rank=_integer(environ, "RANK"),
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK"),
        # Some launchers leave it out; they are the ones that start everything on one machine.
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world_size,
        init_method=init_method,
        source=source,
    )


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    """A step of several tasks. SLURM_PROCID alone does not tell: a batch script has it too, and waits for no other rank."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return False
    if _integer(environ, "SLURM_STEP_ID") >= _FIRST_RESERVED_STEP_ID:
        return False
    return _slurm_world_size(environ) > 1


def _slurm_world_size(environ: Mapping[str, str]) -> int:
    # The step's own count first: SLURM_NTASKS is the job's when a step asked for fewer.
    return _integer(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    world_size = _slurm_world_size(environ)
    return RankEnvironment(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=_slurm_tasks_on_this_node(environ, world_size),
        init_method=f"tcp://{_slurm_address(environ)}:{_slurm_port(environ)}",
        source="slurm",
    )


def _slurm_address(environ: Mapping[str, str]) -> str:
    """The host of rank 0: MASTER_ADDR when a job script chose one, else the step's first host."""
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return expand_nodelist(environ[name])[0]
    raise ValueError(
        "SLURM_STEP_NODELIST is not set, so the ranks cannot find rank 0: start them with srun, or set MASTER_ADDR to its host"
    )


def _slurm_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT when a job script chose one, else one that follows from job and step: every rank computes the same."""
    if environ.get("MASTER_PORT"):
        return _integer(environ, "MASTER_PORT")
    # A step that follows another in the same job must not meet its closing sockets.
    return _FIRST_PORT + (_integer(environ, "SLURM_JOB_ID") * 7 + _integer(environ, "SLURM_STEP_ID")) % _NUM_PORTS


def _slurm_tasks_on_this_node(environ: Mapping[str, str], world_size: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if environ.get(name):
            counts = _expand_counts(environ, name)
            node = _integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
            if node >= len(counts):
                raise ValueError(
                    f"SLURM_NODEID={node} has no entry in {name}={environ[name]!r}: start the ranks with srun"
                )
            return counts[node]
    return world_size


def _expand_counts(environ: Mapping[str, str], name: str) -> list[int]:
    """Tasks per node from Slurm's run-length form: "2(x3),1" is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in environ[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(
                f"{name}={environ[name]!r} is not a list like 2(x3),1: start the ranks with srun, which sets it"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodelist(nodelist: str) -> list[str]:
    """Expand Slurm's short form of host names: "n[01-03,7]-a,gpu4" is n01-a, n02-a, n03-a, n7-a, gpu4.

    Raises:
        ValueError: the brackets or ranges are malformed.
    """
    # A comma separates hosts only outside brackets.
    parts = re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+", nodelist)
    if not parts or ",".join(parts) != nodelist:
        raise ValueError(
            f"node list {nodelist!r} is not of the form host,name[1-3,5]: correct SLURM_STEP_NODELIST or set MASTER_ADDR"
        )
    return [host for part in parts for host in _expand_hosts(part.strip(), nodelist)]


def _expand_hosts(part: str, nodelist: str) -> list[str]:
    """Expand the first bracket of one entry, and the ones after it by recursion: "r[1-2]n[3-4]" has two."""
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    prefix, ranges, rest = match.groups()
    hosts: list[str] = []
    for item in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise ValueError(
                f"node list {nodelist!r}: {item!r} is not a number or a rising range; set MASTER_ADDR instead"
            )
        # The width of the first bound is the zero padding of all.
        numbers = (f"{n:0{len(bounds[1])}d}" for n in range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
        hosts += [prefix + number + tail for number in numbers for tail in _expand_hosts(rest, nodelist)]
    return hosts


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name)
    if value is None:
        raise ValueError(
            f"{name} is not set although other variables say that ranks were started: start them with torchrun or srun"
        )
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not a whole number: correct or unset it") from None
