"""Environment variables of CUDA, torch and Triton, settled by the layout before CUDA is touched.

Each is read once, when the library that reads it starts: setting it later has no effect, and nobody says so. Variables
that a person has set stay.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name since torch 2.9, and the one before, which is still read."""


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = 32
"""Hardware queues of a GPU, which CUDA maps streams to; without the variable it takes eight."""


def settle_environment(
    *,
    tensor: int,
    context: int,
    memory_beside: bool,
    deterministic: bool,
    environ: MutableMapping[str, str] = os.environ,
) -> dict[str, str]:
    """Set what is not set yet.

    Args:
        tensor, context: sizes of these axes.
        memory_beside: memories run on a stream of their own, beside feed-forwards.
        deterministic: set what the libraries below PyTorch need for `parallel.machine.determinism`.
        environ: the environment of this process.

    Returns:
        The variables that were set, by name.
    """
    settled: dict[str, str] = {}
    if memory_beside:
        # With one queue kernels start in the order of their launch: a memory, launched whole before the feed-forward,
        # would run whole before it. The order that collectives need comes from priorities (`parallel.groups`).
        settled[QUEUES] = str(MOST_QUEUES)
    elif tensor > 1 or context > 1:
        # A collective that was launched first is not held up by the product that it is meant to run beside.
        settled[QUEUES] = "1"
    if not any(name in environ for name in ALLOCATOR_VARIABLES):
        # Tables and their gradients are few and large beside activations of changing sizes: fixed segments fragment.
        settled[ALLOCATOR_VARIABLES[1]] = "expandable_segments:True"
    if (folder := local_cache_folder()) is not None:
        # In the home directory, where Triton has it, hundreds of ranks would meet in one folder of a network disk.
        settled["TRITON_CACHE_DIR"] = str(folder / "triton")
    if deterministic:
        # Products that run at once on several streams would share workspaces, and take turns as it happens.
        settled["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        settled["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    settled = {name: value for name, value in settled.items() if name not in environ}
    environ.update(settled)
    return settled


def local_cache_folder() -> Path | None:
    """A folder of this user's on a disk of this machine; None where somebody else has taken the name.

    Compiled kernels are run from it, so nobody else may write there.
    """
    folder = Path(tempfile.gettempdir()) / f"megamem-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_ours = folder.is_dir() and not folder.is_symlink() and status.st_uid == os.getuid()
    return folder if is_ours and not status.st_mode & 0o022 else None
