"""Files that `torch.save` wrote, opened without reading their tensors, and without trusting them.

Such a file is a zip of uncompressed entries: `<prefix>/data.pkl` holds the object, `<prefix>/data/<key>` the elements
of one storage. Checkpoints of PyTorch's distributed format hold one after another in a file.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pretrain.checkpoint.store.lazy_tensor import LazyTensor, fits
from pretrain.checkpoint.store.torch_pickle import load
from pretrain.errors import CheckpointError

# An index of a million tensors has a few hundred megabytes.
_MAX_INDEX_BYTES = 1 << 29
_LOCAL_HEADER = struct.Struct("<4s22xHH")
# Of an entry in the zip's directory: lengths of its name, of what follows that, and of a comment.
_DIRECTORY_HEADER = struct.Struct("<4s24xHHH12x")
# Places of an entry's checksum from the start of either header, and of what follows the entry where it was streamed.
_CRC_IN_LOCAL_HEADER, _CRC_IN_DIRECTORY, _CRC_IN_DESCRIPTOR = 14, 16, 4
_IS_STREAMED = 8
_READ_BYTES = 1 << 22


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence] + offset
        if at < 0:
            raise OSError(f"position {at}")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size < 0 else min(size, left)
        if count > _MAX_INDEX_BYTES:
            raise zipfile.BadZipFile(f"an index of {count} bytes")
        self._file.seek(self._start + self._at)
        content = self._file.read(count)
        self._at += len(content)
        return content


class _Archive:
    """The entries of a zip, by their names below its one folder."""

    def __init__(self, path: Path, file: BinaryIO, start: int, length: int) -> None:
        self._path, self._start, self._length = path, start, length
        self._window = _Window(file, start, length)
        with zipfile.ZipFile(self._window) as archive:
            entries, self._directory = archive.infolist(), archive.start_dir
        prefix = entries[0].filename.partition("/")[0] if entries else ""
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for entry in entries:
            folder, _, name = entry.filename.partition("/")
            if folder != prefix or not name or name in self._entries:
                raise zipfile.BadZipFile(f"an unexpected entry {entry.filename[:80]!r}")
            self._entries[name] = entry

    def place(self, name: str) -> tuple[int, int]:
        """First byte of an entry in the file, and the number of its bytes."""
        entry = self._entries.get(name)
        if entry is None:
            raise zipfile.BadZipFile(f"no entry {name[:80]!r}")
        encrypted = entry.flag_bits & 1
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or encrypted:
            raise zipfile.BadZipFile(f"{name!r} is compressed or encrypted")
        self._window.seek(entry.header_offset)
        header = self._window.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size:
            raise zipfile.BadZipFile(f"{name!r} is missing")
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        found = self._window.read(name_bytes)
        begin = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        # `orig_filename` is the entry's name before Python's own clean-up of it.
        if magic != b"PK\x03\x04" or found != entry.orig_filename.encode():
            raise zipfile.BadZipFile(f"{name!r} is not where it should be")
        if begin + entry.file_size > self._length:
            raise zipfile.BadZipFile(f"{name!r} of {entry.file_size} bytes is longer than the file")
        return self._start + begin, entry.file_size

    def read(self, name: str) -> bytes:
        """A small entry's content."""
        start, size = self.place(name)
        self._window.seek(start - self._start)
        return self._window.read(size)

    def checksum_places(self, at: int) -> tuple[int, int, list[int]]:
        """First byte and size in the file of the entry that byte `at` is in, and the places of its checksum."""
        for name in self._entries:
            start, size = self.place(name)
            if start <= at < start + size:
                break
        else:
            raise zipfile.BadZipFile(f"byte {at} is in no entry")
        entry, header = self._entries[name], self._directory
        while True:
            self._window.seek(header)
            magic, *lengths = _DIRECTORY_HEADER.unpack(self._window.read(_DIRECTORY_HEADER.size))
            if magic != b"PK\x01\x02":
                raise zipfile.BadZipFile(f"{name!r} is not in the directory")
            if self._window.read(lengths[0]) == entry.orig_filename.encode():
                break
            header += _DIRECTORY_HEADER.size + sum(lengths)
        beside = self._start + entry.header_offset + _CRC_IN_LOCAL_HEADER
        if entry.flag_bits & _IS_STREAMED:
            self._window.seek(start + size - self._start)
            has_magic = self._window.read(4) == b"PK\x07\x08"
            beside = start + size + (_CRC_IN_DESCRIPTOR if has_magic else 0)
        return start, size, [self._start + header + _CRC_IN_DIRECTORY, beside]

    def has(self, name: str) -> bool:
        return name in self._entries

    def tensor(
        self,
        key: str,
        num_bytes: int,
        dtype: torch.dtype,
        first: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> LazyTensor:
        """A tensor of a storage, inside of which it must lie."""
        start, size = self.place(f"data/{key}")
        if num_bytes > size or not fits(shape, strides, first, num_bytes // dtype.itemsize):
            raise zipfile.BadZipFile(
                f"a tensor of shape {str(shape)[:80]} and strides {str(strides)[:80]} from element {first} on does not "
                f"fit into the {size} bytes of {key!r}"
            )
        return LazyTensor(shape, dtype, strides, self._path, start + first * dtype.itemsize)


def open_zip(path: Path, start: int = 0, length: int | None = None) -> Any:
    """The object that `torch.save` wrote into a file, with its tensors left where they are.

    Args:
        path: the file.
        start: place of the saved object in the file, in bytes.
        length: its bytes; up to the file's end by default.

    Returns:
        Dictionaries, lists, tuples and plain values as they are; each tensor a `LazyTensor`; objects of any other class
        an `Inert`.

    Raises:
        CheckpointError: the file is missing, damaged, not one of `torch.save`'s zips, or made to exhaust memory.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            length = size - start if length is None else length
            if start < 0 or length < 0 or start + length > size:
                raise zipfile.BadZipFile(f"bytes {start} to {start + length} of a file of {size}")
            archive = _Archive(path, file, start, length)
            if archive.has("byteorder") and archive.read("byteorder") != b"little":
                raise zipfile.BadZipFile("its numbers are not little-endian")
            return load(archive.read("data.pkl"), archive.tensor)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    # Damaged bytes make an unpickler raise anything.
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a file of torch.save's zip format that can be read: {str(error)[:300] or type(error).__name__}"
        ) from error


def renew_checksum(path: Path, start: int, length: int, at: int) -> None:
    """Write the checksum of a changed entry, computed again, into the places where readers of zips look.

    Args:
        path: the file.
        start: place of the saved object in the file, in bytes.
        length: its bytes.
        at: a byte in the file that belongs to the entry.

    Raises:
        CheckpointError: no zip with such an entry is there.
        OSError: the disk refuses.
    """
    try:
        with path.open("r+b") as file:
            begin, left, places = _Archive(path, file, start, length).checksum_places(at)
            checksum = 0
            file.seek(begin)
            while left:
                portion = file.read(min(left, _READ_BYTES))
                if not portion:
                    raise zipfile.BadZipFile(f"{left} bytes of an entry are missing")
                checksum, left = zlib.crc32(portion, checksum), left - len(portion)
            for place in places:
                file.seek(place)
                file.write(checksum.to_bytes(4, "little"))
    except (zipfile.BadZipFile, struct.error) as error:
        raise CheckpointError(f"{path} is not a file of torch.save's zip format: {error}") from error
