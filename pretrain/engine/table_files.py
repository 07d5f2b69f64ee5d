"""Room for tables in files without a name, mapped into memory.

A file is scratch: it is gone with the process that made it, however that ends, and checkpoints are files of their own. The
system keeps the parts of it in memory that it has room for, and may drop them at any time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from pretrain.errors import ConfigError


class TableFiles:
    """Files in a folder, and the memory that they are mapped to."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: on a local disk; made if it is missing.
        """
        self._folder, self._mapped = folder, list[mmap.mmap]()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(mapped) for mapped in self._mapped)

    def zeros(self, num: int, dtype: torch.dtype) -> Tensor:
        """[num] zeros in a file of their own.

        Raises:
            ConfigError: the folder cannot be written, or has no room.
        """
        if not num:
            return torch.zeros(0, dtype=dtype)
        num_bytes = num * dtype.itemsize
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
        return torch.frombuffer(mapped, dtype=dtype)

    def expect_rows(self) -> None:
        """Have the system read single rows: what lies beside one is not wanted."""
        self._advise(mmap.MADV_RANDOM)

    def expect_all(self) -> None:
        """Have the system read ahead: whole tables are about to be read or written."""
        self._advise(mmap.MADV_NORMAL)

    def release(self) -> None:
        """Take the mapped pages out of what the process holds. They stay in the system's cache while it has room."""
        self._advise(mmap.MADV_DONTNEED)

    def _advise(self, advice: int) -> None:
        for mapped in self._mapped:
            mapped.madvise(advice)
