"""Room for tables in files without a name, mapped into memory: of each row one record, its weights and its state.

So a row is in one page of the file, or in two neighbours, whatever is kept of it. A file is scratch: it is gone with the
process that made it, however that ends, and checkpoints are files of their own. The system keeps the parts of it in memory
that it has room for, and may drop them at any time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.errors import ConfigError

_STATE = torch.float32
_READERS = 32
"""Threads that wait for the disk at once, which answers so many requests in the time of a few."""
_ROWS_OF_A_READER = 64
"""Fewer are not worth a thread."""


@dataclass(frozen=True)
class FileRecords:
    """A table in a file, as views of its records.

    Attributes:
        weights: [R, W]; rows are a record apart.
        state: [R] fp32 each, likewise.
        in_bytes: [R b], all of the file.
    """

    weights: Tensor
    state: tuple[Tensor, ...]
    in_bytes: NDArray[np.uint8]

    def touch(self, rows: NDArray[np.int64]) -> None:
        """Look at a byte of every page of rows' records, in which the system then has them; other threads go on meanwhile."""
        size = len(self.in_bytes) // len(self.weights)
        for place in (*range(0, size - 1, mmap.PAGESIZE), size - 1):
            self.in_bytes.take(rows * size + place)


class TableFiles:
    """Files in a folder, and the memory that they are mapped to."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: folder on a local disk; made if it is missing.
        """
        self._folder, self._mapped = folder, list[mmap.mmap]()
        self._are_whole_wanted = True
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="readers")

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(mapped) for mapped in self._mapped)

    def records(self, num_rows: int, width: int, dtype: torch.dtype, num_state: int) -> FileRecords:
        """A table of zeros in a file of its own, with so many numbers of state per row.

        Raises:
            ConfigError: the folder cannot be written, or has no room.
        """
        # Both kinds of numbers have places that they divide.
        unit = max(dtype.itemsize, _STATE.itemsize)
        state_start = -(-width * dtype.itemsize // unit) * unit
        record = -(-(state_start + num_state * _STATE.itemsize) // unit) * unit
        mapped = self._mapped_bytes(num_rows * record)
        weights = torch.frombuffer(mapped, dtype=dtype).view(num_rows, -1)[:, :width]
        numbers = torch.frombuffer(mapped, dtype=_STATE).view(num_rows, -1)[:, state_start // _STATE.itemsize :]
        state = tuple(numbers[:, place] for place in range(num_state))
        return FileRecords(weights, state, np.frombuffer(mapped, dtype=np.uint8))

    def _mapped_bytes(self, num_bytes: int) -> mmap.mmap:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # At once: without room, a write to mapped memory would end the process.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                mapped = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise ConfigError(
                f"optimizer.table_folder is {str(self._folder)!r}, and a table of {num_bytes / 1e9:.3g} GB cannot be made "
                f"there: {error.strerror or error}. Name a folder with room on a local disk, or leave it out"
            ) from error
        self._mapped.append(mapped)
        return mapped

    def bring(self, records: FileRecords, rows: Tensor) -> None:
        """Bring rows [n] of a table into memory, many at a time: one look after the other would wait for the disk each time.
        What lies beside a row is not wanted."""
        self._expect_rows()
        num_parts = min(_READERS, -(-rows.numel() // _ROWS_OF_A_READER))
        if num_parts > 1:
            # Errors of threads are raised here.
            list(self._readers.map(records.touch, np.array_split(rows.numpy(), num_parts)))

    def _expect_rows(self) -> None:
        if self._are_whole_wanted:
            self._are_whole_wanted = False
            # What was mapped stays in the system's cache, as far as that has room.
            self._advise(mmap.MADV_DONTNEED)
            self._advise(mmap.MADV_RANDOM)

    def expect_all(self) -> None:
        """Have the system read ahead: whole tables are about to be read or written."""
        self._are_whole_wanted = True
        self._advise(mmap.MADV_NORMAL)

    def _advise(self, advice: int) -> None:
        for mapped in self._mapped:
            mapped.madvise(advice)
