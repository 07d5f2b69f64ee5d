"""Which formats there are."""

from __future__ import annotations

from pathlib import Path

from pretrain.checkpoint.formats.format import CheckpointFormat, OpenedCheckpoint
from pretrain.checkpoint.formats.native import NativeFormat
from pretrain.errors import CheckpointError

FORMATS: dict[str, CheckpointFormat] = {each.name: each for each in (NativeFormat(),)}
"""By their names; in this order a path is looked at."""


def open_checkpoint(path: Path, step: int | None = None) -> OpenedCheckpoint:
    """Open a checkpoint of whatever format.

    Args:
        step: of a run's checkpoint; None: the newest complete one.

    Raises:
        CheckpointError: there is none, or it cannot be opened.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    for each in FORMATS.values():
        if each.is_at(path):
            return each.open(path, step)
    raise CheckpointError(
        f"{path} is no checkpoint of a format that is known ({', '.join(FORMATS)}): name a run's folder, one of its "
        "checkpoints, or a folder of another format"
    )
