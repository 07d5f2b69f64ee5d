"""Hashes of an exported folder's files, as `sha256sum --check SHA256SUMS` reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretrain.checkpoint.hashes import record
from pretrain.checkpoint.newest import READING_THREADS
from pretrain.checkpoint.store.files import JOURNAL_FILE
from pretrain.errors import CheckpointError

SUMS_FILE = "SHA256SUMS"
_MAX_BYTES = 2**24


def write_sums(folder: Path) -> None:
    """Write the hashes of all files that are in a folder, but those of the conversion itself."""
    names = sorted(
        path.name
        for path in folder.iterdir()
        if not path.name.startswith(".") and path.name not in (JOURNAL_FILE, SUMS_FILE)
    )
    with ThreadPoolExecutor(READING_THREADS) as threads:
        found = list(threads.map(lambda name: record(folder / name), names))
    lines = [f"{file.sha256}  {name}\n" for name, file in zip(names, found, strict=True)]
    (folder / SUMS_FILE).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str] | None:
    """SHA-256 by name of a folder's files; None: nobody wrote them down.

    Raises:
        CheckpointError: the file that has them is damaged.
    """
    path = folder / SUMS_FILE
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy the folder again") from error
    found = [re.fullmatch(r"([0-9a-f]{64})  ([^/\\]+)", line) for line in lines]
    if None in found:
        raise CheckpointError(f"{path} is damaged: line {found.index(None) + 1} is no hash and name")
    return {match[2]: match[1] for match in found if match is not None}


def changed_files(folder: Path, sums: Mapping[str, str], on_bytes: Callable[[int], None]) -> list[str]:
    """Files that are not what was exported, a sentence for each; `on_bytes` is told what is read, from any thread."""

    def problem(name: str) -> str | None:
        try:
            found = record(folder / name, on_bytes).sha256
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
        if found == sums[name]:
            return None
        return f"{name} is not what was exported: copy it again, or remove {SUMS_FILE} if it was changed on purpose"

    with ThreadPoolExecutor(READING_THREADS) as threads:
        return [found for found in threads.map(problem, sorted(sums)) if found is not None]
