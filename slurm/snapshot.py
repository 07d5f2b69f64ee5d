"""The code of a run, as it was when the run was submitted: later edits do not reach a job that is requeued."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from pathlib import Path

PACKAGES = ("kernels", "megamem", "parallel", "pretrain", "slurm", "tools")
_ROOT = Path(__file__).parents[1]
_HASH_LETTERS = 12


def code_files(root: Path) -> list[Path]:
    """The files of the packages below a folder, relative to it, in a fixed order."""
    found = (path for package in PACKAGES for path in (root / package).rglob("*") if path.is_file())
    return sorted(path.relative_to(root) for path in found if "__pycache__" not in path.parts)


def code_hash(root: Path = _ROOT) -> str:
    """Hash of the names and contents of the packages' files: the same wherever they lie."""
    digest = hashlib.sha256()
    for path in code_files(root):
        content = hashlib.sha256((root / path).read_bytes()).hexdigest()
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
        for path in code_files(_ROOT):
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_ROOT / path, partial / path)
        try:
            os.replace(partial, target)
        except OSError:
            # Somebody else had the same code to copy, and was first.
            if not target.exists():
                raise
            shutil.rmtree(partial)
    return name
