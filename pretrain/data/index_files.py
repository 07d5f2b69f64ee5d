"""Index arrays on disk: mapped into memory, held against their hashes, and made by the first process that misses them.

They are a function of what their key stands for, so a damaged one is made again. One flipped bit would otherwise train on
other samples without a word.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel.machine.atomic_write import atomic_write
from pretrain.errors import DataError

Array = NDArray[Any]


def open_index(
    folder: Path, key: str, names: Sequence[str], make: Callable[[list[Path]], None], of: str, *, checked: bool = True
) -> list[Array]:
    """The arrays `key-name.npy` of a folder, mapped into memory.

    Args:
        key: stands for all that the arrays depend on.
        names: names of the arrays.
        make: writes them, each whole or not at all, if one is missing or damaged.
        of: their subject, in words.
        checked: hold the arrays against the hashes in `key-hashes.json`. They are read whole for that: one process of a
            machine does, before the others open them.

    Raises:
        DataError: the arrays cannot be written or read.
    """
    paths, hashes = [folder / f"{key}-{name}.npy" for name in names], folder / f"{key}-hashes.json"
    try:
        problem = _problem(paths, hashes) if checked else None
        if problem is not None or not all(path.is_file() for path in paths):
            if problem is not None and any(path.exists() for path in paths):
                print(f"note: {problem}: the index of {of} is made anew", file=sys.stderr, flush=True)
            make(paths)
            with atomic_write(hashes) as stream:
                stream.write(json.dumps({path.name: _hash(path) for path in paths}, indent=1).encode())
        return [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{folder}: the index of {of} cannot be kept there ({error}). "
            "Free space, or remove the folder if it is damaged: it is rebuilt."
        ) from error


def _problem(paths: Sequence[Path], hashes: Path) -> str | None:
    """Reason for which arrays are not those that were written; None if they are."""
    for path in paths:
        if not path.is_file():
            return f"{path} is missing"
    try:
        written = json.loads(hashes.read_bytes())
    except FileNotFoundError:
        return f"{hashes} is missing, as earlier versions did not write it"
    except ValueError:
        return f"{hashes} is damaged"
    if not isinstance(written, dict) or written.keys() != {path.name for path in paths}:
        return f"{hashes} is damaged"
    return next((f"{path} is damaged" for path in paths if _hash(path) != written[path.name]), None)


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
