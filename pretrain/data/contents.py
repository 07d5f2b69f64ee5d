"""Contents of text files and their lines, decompressed where the name says so, read by read."""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError)
"""Errors of a file that cannot be read, or cannot be read to its end."""
COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
"""Endings of text and lines that are decompressed while they are read."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 256 << 20
MAX_UNPACKED_BYTES = 1 << 30
"""Bytes of a compressed file that is one document: a megabyte on disk may be a gigabyte."""
_READ_BYTES = 1 << 20
# zstd makes up to 128 KiB of four bytes, and all that it makes of what it is given at once.
_ZSTD_BYTES_AT_ONCE = 1 << 9


def ending_of(path: Path) -> str:
    """The ending that names a file's format, in lower case: not that of its compression."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in COMPRESSIONS else name.suffix


def read_whole(path: Path) -> bytes:
    """All that a file holds, decompressed, without a byte order mark.

    Raises:
        UNREADABLE: the file cannot be read.
    """
    most = MAX_UNPACKED_BYTES if path.suffix.lower() in COMPRESSIONS else math.inf
    parts, num_bytes = [], 0
    with path.open("rb") as stream:
        for content in _contents(path, stream):
            parts.append(content)
            num_bytes += len(content)
            if num_bytes > most:
                raise ValueError(
                    f"it is longer than {MAX_UNPACKED_BYTES >> 20} MiB unpacked, and one document: unpack it, or make "
                    "JSON lines of it"
                )
    return b"".join(parts).removeprefix(BYTE_ORDER_MARK)


def read_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Lines without their newline, each with the position reached in the file (bytes, compressed where it is); the first
    one without a byte order mark.

    Raises:
        UNREADABLE: the file cannot be read on.
    """
    first = True
    with path.open("rb") as stream:
        rest = b""
        for content in _contents(path, stream):
            *lines, rest = (rest + content).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise ValueError(f"a line is longer than {MAX_LINE_BYTES >> 20} MiB: is this a file of lines?")
            position = stream.tell()
            for line in lines:
                yield line.removeprefix(BYTE_ORDER_MARK) if first else line, position
                first = False
        if rest:
            yield rest.removeprefix(BYTE_ORDER_MARK) if first else rest, stream.tell()


def _contents(path: Path, stream: BufferedReader) -> Iterator[bytes]:
    """Decompressed contents of the file, read by read."""
    ending = path.suffix.lower()
    if ending == ".zst":
        yield from _zstd_contents(stream)
        return
    if ending in (".gz", ".xz", ".bz2") and path.stat().st_size == 0:
        raise EOFError(f"an empty file is not a {ending} archive")
    # Python's readers read one member after the other, as `cat a.gz b.gz` makes, and detect a truncated one.
    reader: BufferedReader | gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File = stream
    if ending == ".gz":
        reader = gzip.GzipFile(fileobj=stream)
    elif ending == ".xz":
        reader = lzma.LZMAFile(stream)  # noqa: SIM115 - whoever opened the stream closes it
    elif ending == ".bz2":
        reader = bz2.BZ2File(stream)
    # read1, because read would throw away what it had decompressed when it meets the break in a truncated file.
    while content := reader.read1(_READ_BYTES):
        yield content


def _zstd_contents(stream: BufferedReader) -> Iterator[bytes]:
    made, num_bytes = [], 0
    try:
        for part in _zstd_parts(stream):
            made.append(part)
            num_bytes += len(part)
            if num_bytes >= _READ_BYTES:
                yield b"".join(made)
                made, num_bytes = [], 0
    except (ValueError, EOFError):
        # Whatever came before the damage is text.
        yield b"".join(made)
        raise
    yield b"".join(made)


def _zstd_parts(stream: BufferedReader) -> Iterator[bytes]:
    # The package's own stream reader takes a truncated file for a complete one, so frames are followed by hand.
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = decompressor.decompressobj()
    while compressed := stream.read(_ZSTD_BYTES_AT_ONCE):
        while compressed:
            if frame.eof:
                frame = decompressor.decompressobj()
            try:
                yield frame.decompress(compressed)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from error
            compressed = frame.unused_data
    if not frame.eof:
        raise EOFError("the zstd stream ends before its end marker: it is truncated")
