"""Reads of every row of a model's tables in some text, in a file: what `megamem patch counts` writes and
`optimizer.trained_rows` chooses rows by.

Tables of one bank are read together, so a bank has one count per row. The file is NumPy's `.npz`, uncompressed.

Legend: R rows of a bank.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.machine.atomic_write import atomic_write
from pretrain.errors import ConfigError

_NUM_SEQUENCES = "num_sequences"
_FIX = "write it with `megamem patch counts`"
# More than NumPy's header of an array takes.
_HEADER_BYTES = 512


@dataclass(frozen=True)
class ReadCounts:
    """Reads of a bank's rows.

    Attributes:
        reads: [R] int64.
        sequences: [R] int64, sequences that read the row.
        num_sequences: sequences of the text.
    """

    reads: Tensor
    sequences: Tensor
    num_sequences: int


def write_read_counts(path: Path, counts: Mapping[int, ReadCounts]) -> None:
    """Write reads by bank, of one text, into a file."""
    (num_sequences,) = {each.num_sequences for each in counts.values()}
    arrays: dict[str, Any] = {_NUM_SEQUENCES: np.array([num_sequences])}
    for bank, each in counts.items():
        arrays |= dict(zip(_names_of(bank), (each.reads.numpy(), each.sequences.numpy()), strict=True))
    with atomic_write(path) as stream:
        np.savez(stream, **arrays)


def _names_of(bank: int) -> tuple[str, str]:
    """Names, in a file, of the reads of a bank's rows and of the sequences that read them."""
    return f"reads.banks.{bank}", f"sequences.banks.{bank}"


class ReadCountsFile:
    """A file of reads."""

    def __init__(self, path: Path, key: str) -> None:
        """
        Args:
            path: the file.
            key: key of the configuration that names it, for errors.

        Raises:
            ConfigError: the file is missing, or no file of reads.
        """
        self._path, self._what = path, f"{key} is {path}"
        self._num_sequences = int(self._array(_NUM_SEQUENCES, 1)[0])

    def of_bank(self, bank: int, num_rows: int) -> ReadCounts:
        """Reads of a bank's rows.

        Raises:
            ConfigError: the file has none of such a bank.
        """
        reads, sequences = (torch.from_numpy(self._array(name, num_rows)) for name in _names_of(bank))
        return ReadCounts(reads, sequences, self._num_sequences)

    def _array(self, name: str, size: int) -> np.ndarray:
        """An array of so many whole numbers."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                entry = archive.getinfo(f"{name}.npy")
                if entry.compress_type == zipfile.ZIP_STORED and entry.file_size <= 8 * size + _HEADER_BYTES:
                    with archive.open(entry) as stream:
                        found = np.lib.format.read_array(stream, allow_pickle=False)
                    if found.shape == (size,) and found.dtype == np.int64:
                        return found
        except OSError as error:
            raise ConfigError(f"{self._what}, which cannot be read ({error.strerror or error}): {_FIX}") from error
        except (zipfile.BadZipFile, ValueError) as error:
            raise ConfigError(f"{self._what}, which is damaged or no file of reads ({error}): {_FIX}") from error
        except KeyError:
            pass
        if name == _NUM_SEQUENCES:
            raise ConfigError(f"{self._what}, which is no file of reads: {_FIX}")
        raise ConfigError(
            f"{self._what}, which has no {name} of {size:,} rows: it was counted with another model, so {_FIX} again"
        )
