"""Writing Megatron's indexed data sets, one sequence per document.

Megatron's own builder keeps three Python lists that grow with the number of documents, which for 100 GB of text is more
than a machine's memory, and takes the import of all of Megatron. The files are simple:

- `PREFIX.bin`: the ids of all documents, one after the other;
- `PREFIX.prompts` or `PREFIX.scored`, our own, and only where some tokens are not scored: see `pretrain.data.scored`;
- `PREFIX.idx`: a header (magic, version 1, code of the ids' type, number of sequences, number of documents + 1), then
  lengths (int32), starts in bytes (int64), and the sequence with which each document begins (int64).

Here a document's length waits in a third file until the index is written, so that memory does not grow, and so that a
preparation that was cut off can go on: all files are cut back to what was noted.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.data.scored import ScoredFile, open_scored, open_scored_writer

IDX_MAGIC = b"MMIDIDX\0\0"
_VERSION = 1
_HEADER = struct.Struct("<QBQQ")
_CODES: dict[type[np.integer[Any]], int] = {np.int32: 4, np.uint16: 8}
_PER_DOCUMENT = np.dtype([("tokens", "<i8"), ("text_bytes", "<i8"), ("unscored_bytes", "<i8"), ("digest", "<u8")])
_DOCUMENTS_AT_ONCE = 1 << 20


class Document(NamedTuple):
    """A tokenised document.

    Attributes:
        ids: token ids, the end-of-document id included.
        text_bytes: UTF-8 bytes of its text.
        scored: flags of the ids; None: all are scored.
        unscored_bytes: UTF-8 bytes of the text of those that are not.
    """

    ids: NDArray[Any]
    text_bytes: int
    scored: NDArray[np.bool_] | None = None
    unscored_bytes: int = 0


@dataclass(frozen=True)
class Written:
    """Amount of a split that is written."""

    num_documents: int = 0
    num_tokens: int = 0
    """End-of-document tokens included."""
    num_bytes: int = 0
    """UTF-8 bytes of the documents' text."""
    max_token_id: int = 0
    unscored_tokens: int = 0
    """Tokens among them that are not scored."""
    unscored_bytes: int = 0
    """UTF-8 bytes of the text of those."""


class IndexedWriter:
    """Writer of one data set. Use it as a context manager: its files are open inside."""

    def __init__(
        self,
        prefix: Path,
        dtype: type[np.integer[Any]],
        written: Written | None = None,
        *,
        scoring: ScoredFile | None = None,
    ) -> None:
        """Open the files.

        Args:
            prefix: path of the files without their endings.
            dtype: dtype of the ids in the file.
            written: go on after this much, cutting off what follows; None: begin.
            scoring: the file that says which tokens are scored; None: all are.
        """
        self.prefix, self.dtype = prefix, dtype
        self.written = written or Written()
        begins = written is None
        self._bin = self._open(".bin", self.written.num_tokens * np.dtype(dtype).itemsize, begins)
        self._lengths = self._open(".lengths", self.written.num_documents * _PER_DOCUMENT.itemsize, begins)
        self._scored = (
            None
            if scoring is None
            else open_scored_writer(prefix, scoring, self.written.num_documents, self.written.num_tokens)
        )

    def _open(self, ending: str, num_bytes: int, begins: bool) -> IO[bytes]:
        stream = self.file(ending).open("wb" if begins else "r+b")
        stream.truncate(num_bytes)
        stream.seek(num_bytes)
        return stream

    def file(self, ending: str) -> Path:
        """One of the files."""
        return self.prefix.with_name(self.prefix.name + ending)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; what was added is in them."""
        for stream in (self._bin, self._lengths, self._scored):
            if stream is not None:
                stream.close()

    def add(
        self,
        ids: NDArray[Any],
        text_bytes: int,
        scored: NDArray[np.bool_] | None = None,
        unscored_bytes: int = 0,
    ) -> None:
        """Append a document, see `Document`."""
        unscored_tokens = 0 if scored is None else len(ids) - int(scored.sum())
        if self._scored is not None:
            assert scored is not None
            self._scored.add(scored, unscored_bytes)
        self._bin.write(np.ascontiguousarray(ids, self.dtype).data)
        self._lengths.write(struct.pack("<qqqQ", len(ids), text_bytes, unscored_bytes, _digest(ids)))
        before = self.written
        self.written = Written(
            before.num_documents + 1,
            before.num_tokens + len(ids),
            before.num_bytes + text_bytes,
            max(before.max_token_id, int(ids.max())),
            before.unscored_tokens + unscored_tokens,
            before.unscored_bytes + unscored_bytes,
        )

    def sync(self) -> Written:
        """Bring all that was added to disk. Returns its amount."""
        for stream in (self._bin, self._lengths):
            stream.flush()
            os.fsync(stream.fileno())
        if self._scored is not None:
            self._scored.sync()
        return self.written

    def finish(self) -> None:
        """Write the index; the data set is complete on disk, and the file with the lengths has done its work."""
        number = self.written.num_documents
        self.close()
        documents = _per_document(self.prefix)
        with self.file(".idx").open("wb") as stream:
            stream.write(IDX_MAGIC)
            stream.write(_HEADER.pack(_VERSION, _CODES[self.dtype], number, number + 1))
            ranges = [slice(i, min(i + _DOCUMENTS_AT_ONCE, number)) for i in range(0, number, _DOCUMENTS_AT_ONCE)]
            for part in ranges:
                stream.write(documents["tokens"][part].astype("<i4").data)
            start = 0
            for part in ranges:
                sizes = documents["tokens"][part] * np.dtype(self.dtype).itemsize
                stream.write((start + np.cumsum(sizes) - sizes).astype("<i8").data)
                start += int(sizes.sum())
            for first in range(0, number + 1, _DOCUMENTS_AT_ONCE):
                stream.write(np.arange(first, min(first + _DOCUMENTS_AT_ONCE, number + 1), dtype="<i8").data)


def header_problem(file: Path, num_documents: int, ids_bytes: int, num_tokens: int) -> str | None:
    """Fault in the header of an index, in words; None if it is that of such a data set.

    Args:
        ids_bytes: size of the file with the ids.
        num_tokens: tokens that it holds.
    """
    with file.open("rb") as stream:
        content = stream.read(len(IDX_MAGIC) + _HEADER.size)
    if not content.startswith(IDX_MAGIC) or len(content) < len(IDX_MAGIC) + _HEADER.size:
        return "is not an index of Megatron's"
    version, code, num_sequences, num_bounds = _HEADER.unpack(content[len(IDX_MAGIC) :])
    widths = {number: np.dtype(dtype).itemsize for dtype, number in _CODES.items()}
    if version != _VERSION or code not in widths:
        return f"has version {version} and ids of type {code}, which this program does not write"
    if (num_sequences, num_bounds) != (num_documents, num_documents + 1):
        return f"lists {num_sequences} documents where the manifest has {num_documents}"
    if ids_bytes != num_tokens * widths[code]:
        return f"says ids of {widths[code]} bytes, with which {num_tokens} tokens are not {ids_bytes} bytes"
    return None


def read_written(prefix: Path, dtype: type[np.integer[Any]], scoring: ScoredFile | None = None) -> Iterator[Document]:
    """The documents that an `IndexedWriter` has added there, without its index."""
    ids, documents = np.memmap(prefix.with_name(prefix.name + ".bin"), dtype, mode="r"), _per_document(prefix)
    ends = np.cumsum(documents["tokens"])
    scored = None if scoring is None else open_scored(prefix, scoring, ends - documents["tokens"])
    start = 0
    for end, document in zip(ends.tolist(), documents, strict=True):
        flags = None if scored is None else scored.flags(start, end)
        yield Document(ids[start:end], int(document["text_bytes"]), flags, int(document["unscored_bytes"]))
        start = end


def text_bytes(prefix: Path) -> NDArray[Any]:
    """Bytes of text [documents] that an `IndexedWriter` has added there, without its index."""
    return _per_document(prefix)["text_bytes"]


def digests(prefix: Path) -> NDArray[np.uint64]:
    """Hashes [documents] of the ids that an `IndexedWriter` has added there, without its index: equal documents have the
    same."""
    return _per_document(prefix)["digest"]


def _digest(ids: NDArray[Any]) -> int:
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(ids).data, digest_size=8).digest(), "little")


def longest_document(index: Path) -> int:
    """Tokens of the longest document of an index; 0 if it has none."""
    start = len(IDX_MAGIC) + _HEADER.size
    with index.open("rb") as stream:
        _, _, number, _ = _HEADER.unpack(stream.read(start)[len(IDX_MAGIC) :])
    return int(np.fromfile(index, "<i4", number, offset=start).max(initial=0))


def document_starts(index: Path) -> NDArray[np.int64]:
    """First byte [documents] of each document's ids, mapped from an index on disk."""
    start = len(IDX_MAGIC) + _HEADER.size
    with index.open("rb") as stream:
        _, _, number, _ = _HEADER.unpack(stream.read(start)[len(IDX_MAGIC) :])
    if not number:
        return np.empty(0, dtype=np.int64)
    return np.memmap(index, "<i8", mode="r", offset=start + 4 * number, shape=(number,))


def first_documents(prefix: Path, number: int) -> list[NDArray[Any]]:
    """Ids of the first documents of a data set, mapped from disk; without Megatron, whose import takes seconds.

    Raises:
        ValueError: the index names other documents than there are.
    """
    start, index = len(IDX_MAGIC) + _HEADER.size, prefix.with_name(prefix.name + ".idx")
    with index.open("rb") as stream:
        _, code, num_documents, _ = _HEADER.unpack(stream.read(start)[len(IDX_MAGIC) :])
    lengths = np.fromfile(index, "<i4", min(number, num_documents), offset=start).astype(np.int64)
    if not len(lengths):
        return []
    dtype = next(dtype for dtype, of_type in _CODES.items() if of_type == code)
    ids = np.memmap(prefix.with_name(prefix.name + ".bin"), dtype, mode="r")
    if lengths.min() < 0 or lengths.sum() > len(ids):
        raise ValueError(f"it lists {lengths.sum()} ids in {len(lengths)} documents, and there are {len(ids)}")
    return np.split(ids[: lengths.sum()], np.cumsum(lengths)[:-1])


def _per_document(prefix: Path) -> NDArray[Any]:
    file = prefix.with_name(prefix.name + ".lengths")
    if file.stat().st_size == 0:
        return np.empty(0, _PER_DOCUMENT)
    return np.memmap(file, _PER_DOCUMENT, mode="r")
