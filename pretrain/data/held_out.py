"""The held-out documents of a blend: every token predicted once, and how many bytes they stand for."""

from __future__ import annotations

import bisect
import lzma
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.config.schema import DatasetEntry
from pretrain.data.manifest import VALIDATION, PreparedDataset, open_dataset
from pretrain.errors import DataError

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

_READ_TOKENS = 1 << 22


class HeldOutDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows over the held-out documents of all entries, one after the other.

    Every held-out token is the target of exactly one position, the very first one included: an end-of-document token
    stands before it, as it does before every other document. So the summed loss codes the whole text, and can be set
    against its bytes. The last window is padded with positions whose `loss_mask` is 0.

    `num_target_tokens` counts end-of-document tokens and `num_bytes` does not: the model pays for saying where a
    document ends, the text has no byte for it. Bits per byte so defined are never flattered.
    """

    def __init__(self, entries: Sequence[DatasetEntry], sequence_length: int, max_sequences: int | None = None) -> None:
        """
        Args:
            entries: the blend (weights play no part here).
            sequence_length: tokens per window.
            max_sequences: serve only the first so many windows; None: all.

        Raises:
            DataError: a data set that does not open, or arguments below 1.
        """
        if sequence_length < 1 or (max_sequences is not None and max_sequences < 1):
            raise DataError(
                f"Evaluation on {max_sequences} sequences of {sequence_length} tokens is impossible. Give 1 or more."
            )
        datasets = [open_dataset(entry.path) for entry in entries]
        self.tokenizer = datasets[0].tokenizer
        self.sequence_length = sequence_length
        self._paths = [str(dataset.path) for dataset in datasets]
        self._streams = [_TokenStream(dataset) for dataset in datasets]
        self._ends = list(accumulate(len(stream) for stream in self._streams))
        num_tokens = self._ends[-1]
        num_windows = -(-num_tokens // sequence_length)
        if max_sequences is None or max_sequences >= num_windows:
            self._num_windows = num_windows
            self.num_target_tokens = num_tokens
            self.num_bytes = sum(dataset.manifest.splits[VALIDATION].num_bytes for dataset in datasets)
        else:
            self._num_windows = max_sequences
            self.num_target_tokens = max_sequences * sequence_length
            self.num_bytes = self._count_bytes(self.num_target_tokens)

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Window `index`: `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each [sequence_length].

        Raises:
            DataError: the data holds an id outside the vocabulary.
        """
        if not 0 <= index < self._num_windows:
            raise IndexError(index)
        start = index * self.sequence_length
        stop = min(start + self.sequence_length, self._ends[-1])
        eod = self.tokenizer.eod
        ids = np.full(self.sequence_length + 1, eod, dtype=np.int64)
        # Position 0 of the stream has nothing before it but the end-of-document id that is already in place.
        first = max(start - 1, 0)
        ids[1 - (start - first) : 1 + stop - start] = self._read(first, stop)
        loss_mask = torch.zeros(self.sequence_length)
        loss_mask[: stop - start] = 1.0
        sequence = torch.from_numpy(ids)
        return {
            "tokens": sequence[:-1].contiguous(),
            "labels": sequence[1:].contiguous(),
            "loss_mask": loss_mask,
            "position_ids": torch.arange(self.sequence_length),
        }

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        """Ids [stop - start] of the concatenated stream."""
        parts = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            offset = self._ends[number] - len(self._streams[number])
            part = self._streams[number].read(start - offset, min(stop, self._ends[number]) - offset)
            self._check(part, number)
            parts.append(part)
            start += len(part)
            number += 1
        return np.concatenate(parts)

    def _check(self, ids: NDArray[Any], number: int) -> None:
        bad = ids[(ids < 0) | (ids >= self.tokenizer.vocab_size)]
        if bad.size:
            document = self._streams[number].document_with(int(bad[0]))
            raise DataError(
                f"{self._paths[number]}: held-out document {document} holds token id {int(bad[0])}, "
                f"outside the vocabulary of {self.tokenizer.vocab_size}. The data set is damaged or from another "
                "tokenizer: prepare it again."
            )

    def _count_bytes(self, num_tokens: int) -> int:
        """UTF-8 bytes of the first tokens of the stream; exact but for a character that the last one cuts in two."""
        total, start = 0, 0
        while start < num_tokens:
            stop = min(start + _READ_TOKENS, num_tokens)
            ids = self._read(start, stop)
            ends = np.flatnonzero(ids == self.tokenizer.eod)
            if stop < num_tokens and ends.size:
                # Whole documents only, so that no character is cut between two reads.
                ids = ids[: ends[-1] + 1]
            total += self.tokenizer.num_bytes(ids)
            start += len(ids)
        return total


class _TokenStream:
    """The documents of a validation split as one array of ids."""

    def __init__(self, dataset: PreparedDataset) -> None:
        self._documents: IndexedDataset = dataset.open_split(VALIDATION)
        self._starts = np.concatenate([[0], np.cumsum(self._documents.sequence_lengths, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Ids [start, stop) as int64."""
        document = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            length = min(stop, int(self._starts[document + 1])) - start
            parts.append(self._documents.get(document, offset=start - int(self._starts[document]), length=length))
            start += length
            document += 1
        return np.concatenate(parts).astype(np.int64)

    def document_with(self, token_id: int) -> int:
        """Number of the first document that holds an id."""
        return next(
            index for index in range(len(self._documents)) if token_id in self._documents[index].astype(np.int64)
        )


def held_out_documents(entries: Sequence[DatasetEntry]) -> Iterator[bytes]:
    """UTF-8 bytes of each held-out document, in order, decoded from its ids.

    A tokenizer that normalises text gives the normalised one back; byte-level ones give every byte.
    """
    for entry in entries:
        dataset = open_dataset(entry.path)
        documents = dataset.open_split(VALIDATION)
        for index in range(len(documents)):
            yield dataset.tokenizer.decode_bytes(documents[index])


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def compression_baselines(entries: Sequence[DatasetEntry]) -> dict[str, float]:
    """Bits per byte of general compressors on the concatenated held-out documents, by command line."""
    compressors: dict[str, _Compressor] = {
        # 16 + 15 asks zlib for a gzip header around its largest window.
        "gzip -9": zlib.compressobj(level=9, wbits=31),
        "xz -9": lzma.LZMACompressor(format=lzma.FORMAT_XZ, preset=9),
    }
    num_compressed = dict.fromkeys(compressors, 0)
    num_bytes = 0
    for document in held_out_documents(entries):
        num_bytes += len(document)
        for name, compressor in compressors.items():
            num_compressed[name] += len(compressor.compress(document))
    for name, compressor in compressors.items():
        num_compressed[name] += len(compressor.flush())
    return {name: 8.0 * size / num_bytes for name, size in num_compressed.items()}
