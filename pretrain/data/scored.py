"""Tokens of a split that count in the loss, and the files that say so.

- `PREFIX.prompts`, of prompts and answers: for every document the number of its tokens that are not scored, which are its
  first, and the bytes of their text (int32 each);
- `PREFIX.scored`, of conversations: a bit for every token, 1 where it is scored, the first one lowest in its byte.

Where every token is scored there is neither.
"""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

ScoredFile = Literal["prompts", "scored"]
"""Ending of a file's name."""
_PROMPT = np.dtype([("tokens", "<i4"), ("text_bytes", "<i4")])
_BYTES_AT_ONCE = 1 << 20


def scored_path(prefix: Path, kind: ScoredFile) -> Path:
    """Path of a split's file."""
    return prefix.with_name(f"{prefix.name}.{kind}")


def scored_file_bytes(kind: ScoredFile, num_documents: int, num_tokens: int) -> int:
    """Size of a split's file."""
    return num_documents * _PROMPT.itemsize if kind == "prompts" else -(-num_tokens // 8)


class ScoredTokens(ABC):
    """Scored tokens of a split, whose documents lie one behind the other."""

    @abstractmethod
    def flags(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Flags of the tokens [start, stop) of the split: True where one is scored."""

    @abstractmethod
    def count(self, stop: int) -> int:
        """Number of scored tokens among the first `stop`."""


def open_scored(prefix: Path, kind: ScoredFile, starts: NDArray[np.int64], unit: int = 1) -> ScoredTokens:
    """Scored tokens of a split.

    Args:
        prefix: path of the split's files without their endings.
        starts: [documents], the first token of each.
        unit: difference in `starts` from one token to the next.
    """
    file = scored_path(prefix, kind)
    dtype = _PROMPT if kind == "prompts" else np.dtype(np.uint8)
    content: NDArray[Any] = np.memmap(file, dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)
    return AfterPrompts(starts, unit, content["tokens"]) if kind == "prompts" else ScoredBits(content)


@dataclass(frozen=True)
class AfterPrompts(ScoredTokens):
    """Scored tokens of prompts and answers: in each document, those behind its prompt.

    Attributes:
        starts: [documents], the first token of each, in `unit` per token.
        prompts: [documents], tokens of each that are not scored.
    """

    starts: NDArray[np.int64]
    unit: int
    prompts: NDArray[np.int32]

    def flags(self, start: int, stop: int) -> NDArray[np.bool_]:
        # The index may be large, and on disk: a few of its entries are read.
        first = bisect_right(self.starts, start * self.unit) - 1
        documents = slice(first, bisect_left(self.starts, stop * self.unit))
        starts, tokens = self.starts[documents] // self.unit, np.arange(start, stop)
        scored_from = starts + self.prompts[documents]
        found: NDArray[np.bool_] = tokens >= scored_from[np.searchsorted(starts, tokens, side="right") - 1]
        return found

    def count(self, stop: int) -> int:
        starts = self.starts[: bisect_left(self.starts, stop * self.unit)] // self.unit
        ends = np.append(starts, stop)[1:]
        return int(np.clip(ends - starts - self.prompts[: len(starts)], 0, None).sum())


@dataclass(frozen=True)
class ScoredBits(ScoredTokens):
    """Scored tokens of conversations.

    Attributes:
        packed: bytes of eight tokens each.
    """

    packed: NDArray[np.uint8]

    def flags(self, start: int, stop: int) -> NDArray[np.bool_]:
        first = start // 8
        flags = np.unpackbits(self.packed[first : -(-stop // 8)], bitorder="little")
        return flags[start - 8 * first : stop - 8 * first].astype(np.bool_)

    def count(self, stop: int) -> int:
        step = 8 * _BYTES_AT_ONCE
        return sum(int(self.flags(at, min(at + step, stop)).sum()) for at in range(0, stop, step))


def runs_of(scored: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First token, and the one behind the last, of each run of scored tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], scored, [False]])))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


class ScoredWriter(ABC):
    """Writer of one of the files."""

    @abstractmethod
    def add(self, scored: NDArray[np.bool_], unscored_bytes: int) -> None:
        """Append a document: flags of its tokens, and the bytes of the text of those that are not scored."""

    @abstractmethod
    def sync(self) -> None:
        """Bring all that was added to disk."""

    @abstractmethod
    def close(self) -> None:
        """Close the file; what was added is in it."""


def open_scored_writer(prefix: Path, kind: ScoredFile, num_documents: int, num_tokens: int) -> ScoredWriter:
    """Writer that goes on behind so many documents of so many tokens, cutting off what follows."""
    file = scored_path(prefix, kind)
    return PromptsWriter(file, num_documents) if kind == "prompts" else BitsWriter(file, num_tokens)


class PromptsWriter(ScoredWriter):
    """Writer of the lengths of prompts: in each document, the tokens that are not scored are the first."""

    def __init__(self, file: Path, num_documents: int) -> None:
        """Open the file behind so many documents."""
        self._stream = _open_behind(file, num_documents * _PROMPT.itemsize)

    def add(self, scored: NDArray[np.bool_], unscored_bytes: int) -> None:
        self._stream.write(struct.pack("<ii", len(scored) - int(scored.sum()), unscored_bytes))

    def sync(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


class BitsWriter(ScoredWriter):
    """Writer of a bit per token. Those of a byte that is not full wait: they are in the file, and are written anew."""

    def __init__(self, file: Path, num_tokens: int) -> None:
        """Open the file behind so many tokens."""
        whole, rest = divmod(num_tokens, 8)
        last = np.fromfile(file, np.uint8, 1, offset=whole) if rest else np.empty(0, np.uint8)
        self._waiting = np.unpackbits(last, bitorder="little")[:rest].astype(np.bool_)
        self._stream = _open_behind(file, whole)

    def add(self, scored: NDArray[np.bool_], unscored_bytes: int) -> None:
        flags = np.concatenate([self._waiting, scored])
        whole = len(flags) // 8 * 8
        self._stream.write(np.packbits(flags[:whole], bitorder="little").data)
        self._waiting = flags[whole:]

    def sync(self) -> None:
        self._write_waiting()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        if not self._stream.closed:
            self._write_waiting()
        self._stream.close()

    def _write_waiting(self) -> None:
        place = self._stream.tell()
        self._stream.write(np.packbits(self._waiting, bitorder="little").data)
        self._stream.flush()
        self._stream.seek(place)


def _open_behind(file: Path, num_bytes: int) -> IO[bytes]:
    stream = file.open("r+b" if file.exists() else "wb")
    stream.truncate(num_bytes)
    stream.seek(num_bytes)
    return stream
