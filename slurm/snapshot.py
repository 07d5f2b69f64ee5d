"""The code of a run, as it was when the run was submitted: later edits do not reach a job that is requeued."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from pathlib import Path

from megamem.packages import PACKAGES, folder_of

_HASH_LETTERS = 12


def code_files(root: Path | None = None) -> dict[Path, Path]:
    """Files of the packages below a folder, or of those that this process runs, by their places in a snapshot, sorted."""
    found = {
        path.relative_to(folder.parent): path
        for folder in (folder_of(package) if root is None else root / package for package in PACKAGES)
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return dict(sorted(found.items()))


def code_hash(root: Path | None = None) -> str:
    """Hash of the names and contents of the packages' files: the same wherever they lie."""
    digest = hashlib.sha256()
    for path, file in code_files(root).items():
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{path.as_posix()} {content}\n".encode())
    return digest.hexdigest()[:_HASH_LETTERS]


def take_snapshot(folder: Path) -> str:
    """Copy the packages that this process runs into a folder named by their hash, unless they are there.

    Returns:
        The hash.
    """
    name = code_hash()
    target = folder / name
    if not target.exists():
        partial = folder / f".{name}.{uuid.uuid4().hex}"
        for path, file in code_files().items():
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, partial / path)
        try:
            os.replace(partial, target)
        except OSError:
            # Somebody else had the same code to copy, and was first.
            if not target.exists():
                raise
            shutil.rmtree(partial)
    return name
