"""Names that the coming checkpoints of a run need, and what has them already.

A run learns of it before its first step: a save would fail after all steps up to it, or put a checkpoint in the place of
somebody's files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from pretrain.errors import CheckpointError

_OUR_FILES = re.compile(r"__\d+_\d+\.distcp|\.metadata|common\.pt|metadata\.json|state\.json")


def _foreign_entries(path: Path, state_file: str) -> list[str]:
    """Names in a checkpoint's folder that are neither a checkpoint's nor listed in its `state.json`, whole or not."""
    try:
        listed = set(json.loads((path / state_file).read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        listed = set()
    return sorted(
        entry.name
        for entry in path.iterdir()
        if not entry.is_file() or not (_OUR_FILES.fullmatch(entry.name) or entry.name in listed)
    )


def refuse_if_taken(path: Path, state_file: str) -> None:
    """Refuse to replace what is no checkpoint, whole or damaged.

    Raises:
        CheckpointError: a file, a link, or a folder with other files has the name.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        kind = "a link" if path.is_symlink() else "a file"
        raise CheckpointError(f"{path} is {kind}, and a checkpoint of this run is to have its name: move it away")
    if path.is_dir() and (foreign := _foreign_entries(path, state_file)):
        raise CheckpointError(
            f"{path} holds {foreign[0]!r}, which is no file of a checkpoint, and a checkpoint of this run is to have its "
            "name: move it away"
        )
