"""Files that other processes, and the next run, see whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A stream to a file beside `path`, which takes its name and place when the block ends without an error.

    The folder is made if it is missing. If several processes write the same path, the last one wins.

    Raises:
        OSError: the disk refuses. The file that was at `path` is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as stream:
            yield stream
            # The name must not reach the disk before the contents: after a power cut it would stand for nothing.
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        # A name that is too long leaves nothing to remove, and removing it is refused too.
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(temporary)):
            # The name that people know.
            error.filename, error.filename2 = str(path), None
        raise


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
