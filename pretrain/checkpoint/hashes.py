"""What a checkpoint's files should contain: their SHA-256, noted while they are written. No ranks, and no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

READING_THREADS = 4
"""Files that one process reads at a time; hashing and reading leave Python's lock."""
_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class RecordedFile:
    """A file of a checkpoint, as `state.json` notes it.

    Attributes:
        num_bytes: its size.
        sha256: of its contents, in hexadecimal digits; None in checkpoints of format 1.
    """

    num_bytes: int
    sha256: str | None


def record(file: Path, on_bytes: Callable[[int], None] | None = None) -> RecordedFile:
    """Read a file for its size and its hash; `on_bytes` is told how many bytes each portion had.

    Raises:
        OSError: it cannot be read.
    """
    digest, num_bytes = hashlib.sha256(), 0
    for portion in _portions(file):
        digest.update(portion)
        num_bytes += len(portion)
        if on_bytes is not None:
            on_bytes(len(portion))
    return RecordedFile(num_bytes, digest.hexdigest())


def damaged_files(
    path: Path, names: Iterable[str] | None = None, on_bytes: Callable[[int], None] | None = None
) -> list[str]:
    """Read files of a checkpoint, and hold them against what its `state.json` says.

    Args:
        path: the checkpoint's folder.
        names: of the files to read; None: all that are recorded.
        on_bytes: told how many bytes each portion had that was read, in any of several threads.

    Returns:
        What is wrong, a sentence per file that names it, in the order of their names. Files that were recorded without
        a hash (format 1) are held against their sizes alone.

    Raises:
        CheckpointError: `state.json` cannot be read, or a file that it lists is missing or has another size.
    """
    from pretrain.checkpoint.folder import read_state  # which imports this module

    recorded = read_state(path).files
    chosen = sorted(recorded if names is None else set(names))
    with ThreadPoolExecutor(READING_THREADS) as threads:
        found = threads.map(lambda name: _damage(path / name, recorded.get(name), on_bytes), chosen)
        return [problem for problem in found if problem is not None]


def shares(files: Mapping[str, RecordedFile], num_readers: int) -> list[list[str]]:
    """Names of files for each of several readers: each file once, and about as many bytes for everyone."""
    by_reader: list[list[str]] = [[] for _ in range(num_readers)]
    loads = [0] * num_readers
    for name in sorted(files, key=lambda name: (-files[name].num_bytes, name)):
        reader = loads.index(min(loads))
        by_reader[reader].append(name)
        loads[reader] += files[name].num_bytes
    return by_reader


def _damage(file: Path, expected: RecordedFile | None, on_bytes: Callable[[int], None] | None) -> str | None:
    """What is wrong with a file, in words; None if nothing is."""
    if expected is None:
        return f"{file.name} is not among the files that were written"
    if expected.sha256 is None:
        return None
    try:
        found = record(file, on_bytes)
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror or error})"
    if found != expected:
        return f"{file.name} has other contents than were written (SHA-256 {_short(found)}, written {_short(expected)})"
    return None


def _short(file: RecordedFile) -> str:
    return f"{(file.sha256 or '')[:12]}..."


def _portions(file: Path) -> Iterator[memoryview]:
    buffer = bytearray(_READ_BYTES)
    with file.open("rb", buffering=0) as stream:
        for num_bytes in iter(partial(stream.readinto, buffer), 0):
            yield memoryview(buffer)[:num_bytes]
