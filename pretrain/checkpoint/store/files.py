"""Write a checkpoint file by file, in threads, so that it can go on after a kill.

The work is known before it begins: a list of files, each of which knows its contents. Every finished file is noted in a
journal beside it. A process that starts the same work again finds the journal and writes the rest.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from pretrain.checkpoint.store.tensors import Region, TensorReader

JOURNAL_FILE = "progress.json"
"""First the request as one line, then one line for every finished file."""


@dataclass(frozen=True)
class WrittenFile:
    """A file that is complete and on disk.

    Attributes:
        name: its path within the checkpoint.
        num_bytes: its size.
        notes: plain values that its writer needs later on.
    """

    name: str
    num_bytes: int
    notes: Any = None


class OutputFile(Protocol):
    """A file to be written."""

    @property
    def name(self) -> str:
        """Its path within the checkpoint, with slashes."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors in it."""
        ...

    def write(self, path: Path, read: Callable[[Region], Tensor], max_piece_bytes: int) -> Any:
        """Write it, and bring it to disk.

        Args:
            path: path of the file, which does not exist.
            read: gives a region of the tensors to write.
            max_piece_bytes: largest piece of a tensor, in bytes, to hold at a time.

        Returns:
            `WrittenFile.notes`.
        """
        ...


def write_files(
    files: Sequence[OutputFile],
    folder: Path,
    reader: TensorReader,
    *,
    request: Mapping[str, Any],
    num_workers: int,
    max_piece_bytes: int,
    on_bytes: Callable[[int], None],
) -> list[WrittenFile]:
    """Write the files that the folder does not have yet.

    Args:
        folder: folder to write into; with the journal of the same request, its finished files are kept.
        reader: reader of the tensors in the files.
        request: all that the files follow from, as plain values.
        num_workers: threads; each writes a file of its own.
        max_piece_bytes: largest piece of a tensor, in bytes, that a thread holds at a time.
        on_bytes: told of progress, in bytes of tensors, from any thread.

    Returns:
        All files, in their order.

    Raises:
        OSError: the disk refuses.
        CheckpointError: the source is damaged.
    """
    done = finished_files(folder, request)
    journal = _Journal(folder / JOURNAL_FILE, request, list(done.values()))
    stop = threading.Event()

    def write(file: OutputFile) -> WrittenFile:
        if file.name in done:
            on_bytes(file.num_bytes)
            return done[file.name]
        told = 0

        def read(region: Region) -> Tensor:
            nonlocal told
            if stop.is_set():
                raise InterruptedError
            tensor = reader.read(region)
            told += tensor.nbytes
            on_bytes(tensor.nbytes)
            return tensor

        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        notes = file.write(path, read, max_piece_bytes)
        on_bytes(file.num_bytes - told)
        written = WrittenFile(file.name, path.stat().st_size, notes)
        journal.add(written)
        return written

    with ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(write, file) for file in files]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((future for future in futures if future.done() and future.exception()), None)
            if failed is not None:
                failed.result()
            return [future.result() for future in futures]
        finally:
            # On an error, or Ctrl-C: the others end at their next piece.
            stop.set()
            pool.shutdown(cancel_futures=True)


def finished_files(folder: Path, request: Mapping[str, Any]) -> dict[str, WrittenFile]:
    """Files that the journal of a folder lists, if it is of this request and they still have their sizes."""
    try:
        lines = (folder / JOURNAL_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = {}
    try:
        if json.loads(lines[0]) != json.loads(json.dumps(request)):
            return {}
        for line in lines[1:]:
            written = WrittenFile(**json.loads(line))
            path = folder / written.name
            if path.is_file() and path.stat().st_size == written.num_bytes:
                found[written.name] = written
    except (ValueError, TypeError, IndexError):
        # A line that was cut off: the lines before it count.
        pass
    return found


class _Journal:
    """The list of finished files, to which many threads add lines."""

    def __init__(self, path: Path, request: Mapping[str, Any], done: Sequence[WrittenFile]) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._append("w", json.dumps(request), *(json.dumps(asdict(file)) for file in done))

    def add(self, file: WrittenFile) -> None:
        with self._lock:
            self._append("a", json.dumps(asdict(file)))

    def _append(self, mode: str, *lines: str) -> None:
        with self._path.open(mode, encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in lines)
            stream.flush()
            os.fsync(stream.fileno())
