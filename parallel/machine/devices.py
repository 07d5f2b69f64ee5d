"""Facts about this machine's GPUs without touching them, and the choice of a rank's GPU. Imports no torch by itself."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
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
        return _num_gpus()
    number = 0
    for device in visible.split(","):
        # CUDA takes devices up to the first that is none: -1 and an empty name end the list.
        if not device.strip() or device.strip().startswith("-"):
            break
        number += 1
    return number


@cache
def _num_gpus() -> int:
    """GPUs of this machine."""
    if number := len(list(Path("/dev").glob("nvidia[0-9]*"))):
        return number
    # Windows' Linux has one file for all of them, which other makers' GPUs have too.
    return len(_nvidia_smi("--query-gpu=index", "--format=csv,noheader")) if Path("/dev/dxg").exists() else 0


def hide_gpus() -> None:
    """Have this process, and those that it starts, take the machine for one without GPUs. Before torch is imported."""
    os.environ[_VISIBLE] = ""


def keep_cuda_out_of_this_process() -> None:
    """Let this process be asked for GPUs without starting CUDA, because it forks ranks, and forks cannot start it again.

    Packages ask while they are imported. PyTorch answers by the driver's management library if it is told so, and starts
    CUDA all the same if that library is missing, as it is on machines without GPUs. There they are hidden, so that
    PyTorch need not look. Before torch is imported.
    """
    os.environ.setdefault(_ASK_WITHOUT_STARTING, "1")
    if not num_visible_gpus():
        hide_gpus()


@contextmanager
def unseen_gpus() -> Iterator[None]:
    """Hide the GPUs from what is imported in the block, if asking for them would start CUDA in this process."""
    if not num_visible_gpus() or _counted_without_cuda():
        yield
        return
    before = os.environ.get(_VISIBLE)
    hide_gpus()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = before


def _counted_without_cuda() -> bool:
    """True if PyTorch can count the visible GPUs by the driver's management library.

    A container may lack the library, and PyTorch does not ask it for parts of a GPU (MIG).
    """
    if os.environ.get(_VISIBLE, "").strip().startswith("MIG-"):
        return False
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    if library.nvmlInit_v2() != 0:
        return False
    library.nvmlShutdown()
    return True


def why_gpus_are_unusable() -> str | None:
    """Reason why this process cannot use the GPUs visible to it; None if it can, or if there are none.

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
    """Links between the GPUs of this machine, as `nvidia-smi topo -m` names them; None with one GPU, or if unknown.

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
    """Output of nvidia-smi, by lines; empty if it is missing or fails."""
    try:
        result = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_NVIDIA_SMI_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    # Columns are marked with escape codes.
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines() if result.returncode == 0 else []


def built_without_cuda() -> str:
    """Message for a torch without CUDA."""
    return (
        f"torch {version('torch')} was built without CUDA: install a build with it (its version ends with +cu and a "
        "number)"
    )


def gpu_of(local_rank: int, num_visible: int) -> int:
    """The index of a rank's GPU among those that are visible to it.

    Raises:
        ValueError: the visible GPUs are fewer than the ranks on this machine, and more than one.
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
