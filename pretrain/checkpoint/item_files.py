"""Files of items, hashed while they are written.

A rank writes with several threads, each of which has a file of its own at a time, and one item of it in memory. Tensors
that only the optimizer reads have files of their own, so that a reader of the weights reads and checks nothing else.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.derived import is_moment
from pretrain.checkpoint.hashes import RecordedFile
from pretrain.checkpoint.index import StoredItem
from pretrain.checkpoint.store.tensors import Region
from pretrain.checkpoint.write_plan import with_storage_of_its_own


class HashedFile:
    """A new file that is hashed as it is written, and on disk when its block ends without an error.

    Attributes:
        num_bytes: written so far.
    """

    def __init__(self, path: Path) -> None:
        self.num_bytes = 0
        self._path = path
        self._digest = hashlib.sha256()
        self._failure: OSError | None = None

    def __enter__(self) -> HashedFile:
        self._file = self._path.open("xb", buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if self._failure is not None:
            # PyTorch's writer of archives raises something else on top of it.
            raise self._failure

    @property
    def recorded(self) -> RecordedFile:
        """Size and hash of the file, for `state.json`."""
        return RecordedFile(self.num_bytes, self._digest.hexdigest())

    def write(self, content: Any) -> int:
        """Append bytes, all of them.

        Raises:
            OSError: the disk refuses.
        """
        rest = memoryview(content).cast("B")
        total = len(rest)
        self._digest.update(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            error.filename = str(self._path)
            self._failure = error
            raise
        self.num_bytes += total
        return total

    def flush(self) -> None:
        """Do nothing: no bytes are held back, but `torch.save` calls this."""


@dataclass(frozen=True)
class WrittenItemFile:
    """A file that is on disk, with what is in it."""

    name: str
    recorded: RecordedFile
    items: tuple[StoredItem, ...]


class SaveAbandonedError(Exception):
    """A save was given up while this file was being written."""


class FileWriters:
    """Threads that write a rank's items, from when they are made until they are all done or one of them failed."""

    def __init__(self, folder: Path, rank: int, data: Mapping[Region, Tensor], num_threads: int) -> None:
        """Start to write.

        Args:
            folder: exists.
            rank: files are named `__<rank>_<number>.distcp`.
            data: the items, which must not change meanwhile.
            num_threads: threads at work; there are up to twice as many files.
        """
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint")
        self._futures: list[Future[WrittenItemFile]] = [
            self._threads.submit(
                self._write, folder / f"__{rank}_{number}.distcp", {item: data[item] for item in items}
            )
            for number, items in enumerate(files_of(data, num_threads))
        ]
        self._threads.shutdown(wait=False)

    @property
    def are_done(self) -> bool:
        """True if no file is being written any more, whether or not all succeeded."""
        return all(future.done() for future in self._futures)

    @property
    def failure(self) -> BaseException | None:
        """The first error of a write, before those of files abandoned because of it; None if all went well."""
        failures = [error for future in self._futures if future.done() and (error := future.exception()) is not None]
        return min(failures, key=lambda error: isinstance(error, SaveAbandonedError), default=None)

    def wait(self) -> list[WrittenItemFile]:
        """The files, when all of them are on disk.

        Raises:
            OSError: the disk refuses.
            SaveAbandonedError: the save was given up, and not for a failure on this rank.
        """
        wait(self._futures)
        if (failure := self.failure) is not None:
            raise failure
        return [future.result() for future in self._futures]

    def abandon(self) -> None:
        """Write no further than the items at hand."""
        self._stop.set()

    def _write(self, path: Path, data: Mapping[Region, Tensor]) -> WrittenItemFile:
        try:
            return write_file(path, data, self._stop)
        except BaseException:
            # The other threads' files will not be used.
            self._stop.set()
            raise


def write_file(path: Path, data: Mapping[Region, Tensor], stop: threading.Event) -> WrittenItemFile:
    """Write items into a new file, one after the other, until another thread says stop.

    Raises:
        OSError: the disk refuses.
        SaveAbandonedError: another thread said stop.
    """
    items = []
    with HashedFile(path) as file:
        for region, tensor in data.items():
            if stop.is_set():
                raise SaveAbandonedError(path.name)
            start = file.num_bytes
            torch.save(with_storage_of_its_own(tensor), file)  # type: ignore[arg-type]
            items.append(StoredItem(path.name, start, file.num_bytes - start, region))
    return WrittenItemFile(path.name, file.recorded, tuple(items))


def files_of(data: Mapping[Region, Tensor], num_threads: int) -> list[list[Region]]:
    """The items of each file: what the model needs, then what the optimizer alone needs, each in as many files as
    there are threads, of about the same bytes; files without an item are left out.
    """
    files: list[list[Region]] = []
    for of_optimizer in (False, True):
        chosen = [item for item in data if is_moment(item.name) == of_optimizer]
        files += [items for items in _balanced(chosen, data, num_threads) if items]
    return files


def _balanced(items: Sequence[Region], data: Mapping[Region, Tensor], num_files: int) -> list[list[Region]]:
    files: list[list[Region]] = [[] for _ in range(num_files)]
    loads = [0] * num_files
    for item in sorted(items, key=lambda item: -data[item].nbytes):
        emptiest = loads.index(min(loads))
        files[emptiest].append(item)
        loads[emptiest] += data[item].nbytes
    # A reader goes through a file from its start to its end.
    return [sorted(items, key=lambda item: (item.name, item.offset)) for items in files]
