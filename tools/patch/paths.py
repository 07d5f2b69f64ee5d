"""Paths of a patch, looked at before anything slow is imported: this imports no torch."""

from __future__ import annotations

from pathlib import Path

from parallel.machine.refusals import check_can_write
from pretrain.errors import CheckpointError, ConfigError


def check_output(path: Path) -> None:
    """Refuse to write a file where something is already, or where nothing can be written.

    Raises:
        ConfigError: something is there already.
        OSError: the disk refuses.
    """
    if path.exists() or path.is_symlink():
        raise ConfigError(f"--output is {path}, which is there already: name a file that is not, or remove it")
    check_can_write(path)


def check_patch(path: Path) -> None:
    """Refuse a patch that is no file.

    Raises:
        CheckpointError: no file is there.
    """
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
        raise CheckpointError(f"{path}: {found}. Give a patch that `megamem patch make` wrote")
