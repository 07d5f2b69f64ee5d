"""What can be said of this machine's GPUs without touching them. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def num_visible_gpus() -> int:
    """GPUs that ranks of this machine may use."""
    # Asking torch would initialise CUDA in this process, which may be about to fork.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
