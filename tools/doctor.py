"""`megamem doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from kernels.implementations import compiler, unavailable
from kernels.processor import multiplies_bf16
from parallel.machine.devices import num_visible_gpus, why_gpus_are_unusable
from parallel.machine.environment import local_cache_folder
from pretrain.config.stages import load_stages
from pretrain.errors import ConfigError, UserError
from pretrain.run.folder import RunFolder, default_run_folder
from pretrain.run.preflight import check_stages, machine_memory_bytes
from tools.common.parsers import add_command, add_config
from tools.common.ranks import add_device, ranks_for_stages
from tools.common.words import plural

_EPILOG = """\
examples:
  megamem doctor
  megamem doctor configs/quickstart.yaml
  megamem doctor configs/ultramemv2/227m_1.2b.yaml --ranks 8

`lacks` marks what is needed and missing, and makes the exit code 2; `note` marks what is worth a look. With a
configuration, doctor also says whether that can run here, and what prevents it.
"""

_FOR = {
    "gpu": "memory kernels on GPUs",
    "te": "model.implementation: transformer_engine",
    "deepspeed": "a faster optimizer.value_offload: cpu",
    "tracking": "logging.tensorboard and logging.wandb_mode",
    "hf": "conversion from and to Hugging Face",
}
"""Uses of an extra's packages. The other extras are for those who change the code."""

_SHARED_MEMORY_BYTES = 1 << 30
_FILE_HANDLES = 4096
_CLOCK_IS_UNSYNCHRONISED = 5
_BYTES_OF_TIMEX = 512


@dataclass(frozen=True)
class DoctorLine:
    """One line of the page.

    Attributes:
        name: the thing that was looked at.
        state: `lacks`: a run needs it, and it is not there.
        text: the finding in words.
        fix: advice, where there is something to do.
    """

    name: str
    state: Literal["ok", "note", "lacks"]
    text: str
    fix: str = ""


def add_parser(subparsers: Any) -> None:
    """Adds `doctor` to the commands of `megamem`."""
    parser = add_command(
        subparsers,
        "doctor",
        "what this machine has and lacks, with the fix beside each line",
        _EPILOG,
        "Look at packages, GPUs, compilers, limits and folders of this machine, and say what to mend.",
    )
    add_config(parser, "YAML file: say whether it can run here, too", "set keys of CONFIG", is_needed=False)
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of CONFIG here (default: what `megamem train` would start)"
    )
    add_device(parser)
    parser.set_defaults(func=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Looks and prints."""
    if args.ranks is not None and args.config is None:
        raise ConfigError("--ranks has no effect without CONFIG: name one, or leave --ranks out")
    found = []
    for look in LOOKS:
        for finding in look():
            found.append(finding)
            _print(finding)
    if args.config is not None:
        finding = look_at_config(args.config, args.overrides, args.ranks)
        found.append(finding)
        _print(finding)
    lacking = sum(finding.state == "lacks" for finding in found)
    print(f"{plural(lacking, 'thing')} to mend." if lacking else "Nothing is lacking.")
    return ConfigError.exit_code if lacking else 0


def _print(finding: DoctorLine) -> None:
    print(f"{finding.state:<5}  {finding.name}: {finding.text}", flush=True)
    if finding.fix:
        print(f"       -> {finding.fix}", flush=True)


def look_at_packages() -> Iterator[DoctorLine]:
    """Python, and every package that is declared, against its range."""
    yield DoctorLine("Python", "ok", f"{platform.python_version()}, {sys.executable}")
    try:
        wanted = [Requirement(text) for text in requires("megamem") or []]
    except PackageNotFoundError:
        yield DoctorLine(
            "megamem",
            "lacks",
            "not installed, so nothing says which packages it needs",
            "pip install -e . in its folder",
        )
        return
    for requirement in wanted:
        extras = [extra for extra in _FOR if requirement.marker and requirement.marker.evaluate({"extra": extra})]
        if requirement.marker is None:
            yield _package(requirement, None)
        elif extras:
            yield _package(requirement, extras[0])


def _package(requirement: Requirement, extra: str | None) -> DoctorLine:
    what = f" ({_FOR[extra]})" if extra else ""
    install = f'pip install "megamem[{extra}]"' if extra else f'pip install "{requirement}"'
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return DoctorLine(
            requirement.name,
            "note" if extra else "lacks",
            f"not installed{what}",
            f"{install}{', if you want that' if extra else ''}",
        )
    if requirement.specifier.contains(found, prereleases=True):
        return DoctorLine(requirement.name, "ok", f"{found}{what}")
    return DoctorLine(
        requirement.name, "note" if extra else "lacks", f"{found}, outside of {requirement.specifier}{what}", install
    )


def look_at_gpus() -> Iterator[DoctorLine]:
    """GPUs, their driver, and what torch can do with them."""
    number = num_visible_gpus()
    if not number:
        yield DoctorLine("GPUs", "ok", "none visible: everything runs on the CPU")
        return
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else "no version to be read"
    yield DoctorLine("NVIDIA driver", "ok" if driver.exists() else "note", text)
    if reason := why_gpus_are_unusable():
        yield DoctorLine(
            "GPUs", "lacks", f"{number} visible, and unusable: {reason}", "or leave them idle: --device cpu"
        )
        return
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield DoctorLine(
            f"GPU {index}",
            "ok",
            f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, compute capability "
            f"{properties.major}.{properties.minor}",
        )
    apart = [
        (one, other)
        for one in range(torch.cuda.device_count())
        for other in range(one)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        yield DoctorLine(
            "links",
            "note",
            f"GPUs {apart[0][1]} and {apart[0][0]} cannot reach each other's memory: tensor parallelism will be slow",
            "keep parallel.tensor and parallel.memory within GPUs that can (`nvidia-smi topo -m`)",
        )
    nccl: Any = torch.cuda.nccl.version()
    yield DoctorLine("NCCL", "ok", ".".join(map(str, nccl)))


def look_at_kernels() -> Iterator[DoctorLine]:
    """Report the kernels that `train.kernels: auto` will find."""
    from kernels.common.cpp import cache_folder  # imports torch

    if num_visible_gpus():
        reason = unavailable("triton", "cuda")
        yield DoctorLine("kernels on GPUs", "note" if reason else "ok", f"triton {reason}" if reason else "triton")
    reason = unavailable("cpu", "cpu")
    if reason:
        yield DoctorLine("kernels on CPUs", "note", "PyTorch's operations, as there is no C++ compiler", "install g++")
    else:
        yield DoctorLine("kernels on CPUs", "ok", f"C++, compiled by {compiler()} into {cache_folder()}")
    for name, folder, fix in (
        ("folder of compiled kernels", cache_folder(), "set MEGAMEM_CACHE_DIR to a folder of yours"),
        (
            "folder of Triton's kernels",
            local_cache_folder(),
            "set TRITON_CACHE_DIR to a folder on a disk of this machine",
        ),
    ):
        if folder is None:
            yield DoctorLine(name, "note", "the temporary folder has one of that name which others can write", fix)
            continue
        try:
            RunFolder(folder).check_writable()
        except ConfigError:
            yield DoctorLine(name, "lacks", f"{folder} cannot be written", fix)


def look_at_limits() -> Iterator[DoctorLine]:
    """Cores, memory, and what the system lets a process have."""
    own = sorted(os.sched_getaffinity(0))
    yield DoctorLine("cores and memory", "ok", f"{plural(len(own), 'core')}, {machine_memory_bytes() / 1e9:.0f} GB")
    yield DoctorLine("bf16 on CPUs", "ok", _bf16_on_cores())
    load, on_machine = os.getloadavg()[0], os.cpu_count() or len(own)
    busy = load >= on_machine / 2
    half = f"{own[0]}-{own[len(own) // 2 - 1]}" if len(own) >= 4 else f"{own[0]}"
    yield DoctorLine(
        "other work",
        "note" if busy else "ok",
        f"a load of {load:.1f} on {plural(on_machine, 'core')} in the last minute",
        # Measured: a training with as many threads as cores, beside two that had a core each, at a thirteenth of its speed.
        f"give a run cores of its own (taskset -c {half} megamem ...): threads that wait for each other lose far more "
        "than their share of busy cores; megamem study compare and recall have --at-once"
        if busy
        else "",
    )
    handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= handles < _FILE_HANDLES
    yield DoctorLine(
        "file handles",
        "note" if few else "ok",
        f"{handles:,} per process" if handles >= 0 else "as many as wanted",
        f"ulimit -n {_FILE_HANDLES} or more: every connection between ranks takes some" if few else "",
    )
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    small = shared < _SHARED_MEMORY_BYTES
    yield DoctorLine(
        "shared memory",
        "note" if small else "ok",
        f"{shared / 1e9:.1f} GB free in /dev/shm",
        "docker run --shm-size 8g, or data.num_workers: 0 and NCCL_SHM_DISABLE=1" if small else "",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if num_visible_gpus() and 0 <= locked < 1 << 30:
        yield DoctorLine(
            "locked memory",
            "note",
            f"{locked // 1024:,} kB per process",
            "ulimit -l unlimited: RDMA between nodes, and tables in host memory, need it",
        )
    if not _clock_is_synchronised():
        yield DoctorLine(
            "clock",
            "note",
            "not synchronised: files of several nodes will seem to be from the future",
            "start chrony or systemd-timesyncd, on the host if this is a container",
        )
    srun = shutil.which("srun")
    yield DoctorLine("Slurm", "ok", srun or "no srun here: ranks are started by megamem itself, or by torchrun")


def _bf16_on_cores() -> str:
    """Its place beside fp32, which docs/using.md measures."""
    if multiplies_bf16():
        return "these cores multiply its matrices: wide models train faster than in fp32"
    return "these cores cannot multiply its matrices: products are taken in fp32, so that fp32 alone is somewhat faster"


def _clock_is_synchronised() -> bool:
    """True if the kernel says that its clock is synchronised, or cannot be asked."""
    try:
        # Reading alone: `modes`, the first field, is 0.
        state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_BYTES_OF_TIMEX))
    except (OSError, AttributeError):
        return True
    return state != _CLOCK_IS_UNSYNCHRONISED


def look_at_config(path: str, overrides: list[str], ranks: int | None) -> DoctorLine:
    """Tell whether a configuration can run here."""
    try:
        stages = load_stages(path, overrides)
        num_ranks = ranks or ranks_for_stages(stages)
        check_stages(stages, num_ranks, RunFolder(default_run_folder(stages[0].name)), local=True)
    except UserError as error:
        return DoctorLine(path, "lacks", "cannot run here", str(error))
    text = f"can run here on {plural(num_ranks, 'rank')}"
    if any(stage.train.precision == "bf16" for stage in stages) and not (num_visible_gpus() or multiplies_bf16()):
        return DoctorLine(
            path,
            "note",
            f"{text}, in bf16, whose products these cores take in fp32",
            "train.precision=fp32 is somewhat faster here",
        )
    return DoctorLine(path, "ok", text)


LOOKS: tuple[Callable[[], Iterator[DoctorLine]], ...] = (
    look_at_packages,
    look_at_gpus,
    look_at_kernels,
    look_at_limits,
)
"""Looks at the machine, in the order of the page."""
