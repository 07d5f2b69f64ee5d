"""What can be said of this machine's GPUs without touching them, and which one a rank uses. Imports no torch by itself."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Makes `torch.cuda.is_available()` ask the driver's management library, which starts nothing in this process.
_ASK_WITHOUT_STARTING = "PYTORCH_NVML_BASED_CUDA_CHECK"
# Without a daemon that keeps the driver loaded it takes seconds.
_NVIDIA_SMI_PATIENCE_S = 30.0


def num_visible_gpus(environ: Mapping[str, str] | None = None) -> int:
    """GPUs that ranks of this machine may use."""
    # Asking torch would initialise CUDA in this process, which may be about to fork.
    visible = (os.environ if environ is None else environ).get(_VISIBLE)
    if visible is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    number = 0
    for device in visible.split(","):
        # CUDA takes devices up to the first that is none: -1 and an empty name end the list.
        if not device.strip() or device.strip().startswith("-"):
            break
        number += 1
    return number


def hide_gpus() -> None:
    """Have this process, and those that it starts, take the machine for one without GPUs. Before torch is imported."""
    os.environ[_VISIBLE] = ""


def ask_for_gpus_without_starting_cuda() -> None:
    """For a process that imports Megatron, which asks whether CUDA is available, and is forked afterwards.

    Who asks in the usual way starts the driver, and the forks of such a process cannot use it.
    """
    os.environ.setdefault(_ASK_WITHOUT_STARTING, "1")


def why_gpus_are_unusable() -> str | None:
    """What keeps this process from the GPUs that are visible to it; None if nothing does, or if there are none.

    Starts CUDA in this process.
    """
    if not num_visible_gpus():
        return None
    import torch

    if torch.version.cuda is None:
        return built_without_cuda()
    # Asked in earnest now.
    os.environ.pop(_ASK_WITHOUT_STARTING, None)
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"CUDA {torch.version.cuda} of torch {torch.__version__} does not start: {error}"
    return None


def smallest_gpu_bytes() -> int | None:
    """Memory of the smallest visible GPU, by the driver's own program; None where that does not say. Starts nothing."""
    lines = _nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits", *_visible_ids())
    sizes = [int(line) for line in lines if line.isdecimal()]
    return min(sizes) * 1024**2 if sizes else None


def gpu_names() -> list[str]:
    """Names of the visible GPUs, by the driver's own program; none where that does not say. Starts nothing."""
    return [line.strip() for line in _nvidia_smi("--query-gpu=name", "--format=csv,noheader", *_visible_ids())]


def gpu_links() -> str | None:
    """How the GPUs of this machine reach each other, as `nvidia-smi topo -m` has it; None with one, or if unknown.

    NV and a number are so many NVLinks; PIX, PXB, PHB, NODE and SYS are ways over PCIe, from the shortest to the
    longest.
    """
    rows = [line.split() for line in _nvidia_smi("topo", "-m") if line.startswith("GPU")]
    # Below the diagonal, beside which columns of network cards stand. The line that names the columns is indented.
    links = {kind for number, row in enumerate(rows) for kind in row[1 : number + 1]}
    return ", ".join(sorted(links)) or None


def _visible_ids() -> tuple[str, ...]:
    visible = os.environ.get(_VISIBLE)
    return () if visible is None else (f"--id={','.join(visible.split(',')[: num_visible_gpus()])}",)


def _nvidia_smi(*arguments: str) -> list[str]:
    """What it prints, by lines; nothing if it is missing or fails."""
    try:
        result = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_NVIDIA_SMI_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    # Columns are marked with escape codes.
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines() if result.returncode == 0 else []


def built_without_cuda() -> str:
    """What to say of a torch without CUDA."""
    return (
        f"torch {version('torch')} was built without CUDA: install a build with it (its version ends with +cu and a "
        "number)"
    )


def gpu_of(local_rank: int, num_visible: int) -> int:
    """The index of a rank's GPU among those that are visible to it.

    Raises:
        ValueError: there are fewer than ranks on this machine, and more than one.
    """
    # A launcher that binds (`--gpus-per-task=1`) shows each rank its own and no other.
    if num_visible == 1:
        return 0
    if local_rank >= num_visible:
        raise ValueError(
            f"local rank {local_rank} sees {num_visible} GPUs: start as many ranks per machine as it has GPUs, or show "
            "each rank its own one"
        )
    return local_rank
