"""SHA-256 of a checkpoint's files, noted while they are written. No ranks, and no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class RecordedFile:
    """A file of a checkpoint, as `state.json` notes it.

    Attributes:
        num_bytes: its size.
        sha256: hash of its contents, in hexadecimal digits; None in checkpoints of format 1.
    """

    num_bytes: int
    sha256: str | None


def record(file: Path, on_bytes: Callable[[int], None] | None = None) -> RecordedFile:
    """Read a file for its size and its hash; `on_bytes` is told how many bytes each portion had.

    Raises:
        OSError: the file cannot be read.
    """
    digest, num_bytes = hashlib.sha256(), 0
    for portion in _portions(file):
        digest.update(portion)
        num_bytes += len(portion)
        if on_bytes is not None:
            on_bytes(len(portion))
    return RecordedFile(num_bytes, digest.hexdigest())


def shares(files: Mapping[str, RecordedFile], num_readers: int) -> list[list[str]]:
    """Names of files for each of several readers: each file once, and about as many bytes for everyone."""
    by_reader: list[list[str]] = [[] for _ in range(num_readers)]
    loads = [0] * num_readers
    for name in sorted(files, key=lambda name: (-files[name].num_bytes, name)):
        reader = loads.index(min(loads))
        by_reader[reader].append(name)
        loads[reader] += files[name].num_bytes
    return by_reader


def _portions(file: Path) -> Iterator[memoryview]:
    buffer = bytearray(_READ_BYTES)
    with file.open("rb", buffering=0) as stream:
        for num_bytes in iter(partial(stream.readinto, buffer), 0):
            yield memoryview(buffer)[:num_bytes]
