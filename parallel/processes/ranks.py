"""Rank of this process, read from the environment that torchrun, Slurm's srun or our own launcher left behind.

A command that may be started by any of the three asks `current_ranks()` once, before it touches a process group: None
means that nobody started ranks yet and the command starts its own (`parallel.processes.launch`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

RENDEZVOUS_VARIABLE = "MEGAMEM_RENDEZVOUS"

# Step ids from here on are Slurm's own (batch script, interactive shell, extern): they hold a shell, not ranks.
_FIRST_RESERVED_STEP_ID = 0xFFFFFFF0

# Below Linux's ephemeral range (32768 and up), above the ports that services register.
_FIRST_PORT = 20000
_NUM_PORTS = 12000


@dataclass(frozen=True)
class RankEnvironment:
    """Place of one process among the ranks of a job, and the address where the ranks find each other."""

    rank: int
    """Number of this process in the job, from 0."""
    world_size: int
    """Number of processes in the job."""
    local_rank: int
    """Number of this process on its machine, from 0: the index of its GPU."""
    init_method: str
    """URL of the store where the ranks meet, for `torch.distributed.rendezvous`."""
    are_watched: bool = False
    """True if a process watches over the ranks and ends all of them when one fails: our own launcher does."""

    def address(self, environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
        """Host and port where the ranks meet; None where that is a file."""
        environ = os.environ if environ is None else environ
        if self.init_method == "env://":
            return environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        url = urlsplit(self.init_method)
        return None if url.hostname is None or url.port is None else (url.hostname, url.port)


def current_ranks(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return this process's place among ranks that were already started, or None when nobody started any.

    Our own launcher is looked for first, then torchrun (`RANK`), then a Slurm job step (`srun`): torchrun inside srun
    and our launcher inside either inherit the outer variables, and the innermost one is meant. An allocation without
    `srun` (`salloc`, a batch script) and a step of a single task (`srun --pty bash`) are not ranks.

    Args:
        environ: the environment to read; the process's own by default.

    Raises:
        ValueError: the variables contradict each other, or one is missing or not a number. The message names it and the
            fix.
    """
    environ = os.environ if environ is None else environ
    if RENDEZVOUS_VARIABLE in environ:
        return replace(_from_variables(environ, environ[RENDEZVOUS_VARIABLE]), are_watched=True)
    if "RANK" in environ:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise ValueError(
                    f"RANK={environ['RANK']!r} is set but {name} is not: set {name} to the host and port of rank 0, "
                    "start with torchrun, which sets them, or unset RANK to start local ranks"
                )
        _integer(environ, "MASTER_PORT")
        # Not tcp://: torchrun's agent already serves this port, and env:// knows it.
        return _from_variables(environ, "env://")
    # SLURM_PROCID alone does not tell: a batch script has it too, and waits for no other rank.
    is_step = "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ
    if (
        is_step
        and _integer(environ, "SLURM_STEP_ID") < _FIRST_RESERVED_STEP_ID
        and _integer(environ, _slurm_size_name(environ)) > 1
    ):
        return _from_slurm(environ)
    if environ.get("WORLD_SIZE", "1") != "1" and "SLURM_JOB_ID" not in environ:
        raise ValueError(
            f"WORLD_SIZE={environ['WORLD_SIZE']!r} is set but RANK is not: unset WORLD_SIZE to start local ranks, "
            "or start with torchrun, which sets both"
        )
    return None


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def said_by_variables_alone(environ: Mapping[str, str] | None = None) -> str | None:
    """A sentence on the variables that make this process a rank, if no launcher is known that has set them.

    They may be left over from another run: an `export` in a shell, the environment of an image.
    """
    environ = os.environ if environ is None else environ
    if RENDEZVOUS_VARIABLE in environ or "TORCHELASTIC_RUN_ID" in environ or "RANK" not in environ:
        return None
    there = [name for name in _VARIABLES if name in environ]
    said = " ".join(f"{name}={environ[name]}" for name in there if name in ("RANK", "WORLD_SIZE"))
    return (
        f"{said} in the environment makes this process one of several ranks that somebody else has started; if nobody "
        f"has, `unset {' '.join(there)}` first"
    )


def _from_variables(environ: Mapping[str, str], init_method: str) -> RankEnvironment:
    # Some launchers leave LOCAL_WORLD_SIZE out; they are the ones that start everything on one machine.
    local_size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "WORLD_SIZE"
    return RankEnvironment(
        rank=_rank(environ, "RANK", "WORLD_SIZE"),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_rank=_rank(environ, "LOCAL_RANK", local_size_name),
        init_method=init_method,
    )


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    # Where a job script chose no port, one that follows from job and step, which every rank computes alike. A step that
    # follows another in the same job must not meet its closing sockets.
    port = _FIRST_PORT + (_integer(environ, "SLURM_JOB_ID") * 7 + _integer(environ, "SLURM_STEP_ID")) % _NUM_PORTS
    if environ.get("MASTER_PORT"):
        port = _integer(environ, "MASTER_PORT")
    size_name = _slurm_size_name(environ)
    return RankEnvironment(
        rank=_rank(environ, "SLURM_PROCID", size_name),
        world_size=_integer(environ, size_name),
        local_rank=_rank(environ, "SLURM_LOCALID", size_name),
        init_method=f"tcp://{environ.get('MASTER_ADDR') or _slurm_first_host(environ)}:{port}",
    )


def _slurm_size_name(environ: Mapping[str, str]) -> str:
    # The step's own count first: SLURM_NTASKS is the job's when a step asked for fewer.
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _slurm_first_host(environ: Mapping[str, str]) -> str:
    """The host of rank 0, which is the step's first."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return first_host(environ[name])
    raise ValueError(
        "SLURM_STEP_NODELIST is not set, so the ranks cannot find rank 0: start them with srun, "
        "or set MASTER_ADDR to its host"
    )


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form of host names: "n[01-03,7]-a,gpu4" starts with n01-a.

    Raises:
        ValueError: the brackets or ranges are malformed.
    """
    ranges = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
    host = rf"(?:{ranges}|[^,\[\]])+"
    if re.fullmatch(rf"{host}(?:,{host})*", nodelist) is None:
        raise ValueError(
            f"node list {nodelist!r} is not of the form host,name[1-3,5]: "
            "correct SLURM_STEP_NODELIST or set MASTER_ADDR"
        )
    # A comma separates hosts only outside brackets. A bracket's first number is where it starts.
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.findall(host, nodelist)[0])


def _rank(environ: Mapping[str, str], name: str, size_name: str) -> int:
    """One of the numbers from 0 to that of `size_name` - 1."""
    rank, size = _integer(environ, name), _integer(environ, size_name)
    if not 0 <= rank < size:
        raise ValueError(
            f"{name}={rank} is not a rank of {size_name}={size}: ranks run from 0 to {size_name} - 1; "
            "start every process with torchrun or srun, which set both"
        )
    return rank


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
