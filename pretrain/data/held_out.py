"""The held-out documents of a blend: every token predicted once, and how many bytes they stand for."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.config.schema import DatasetEntry
from pretrain.data.manifest import VALIDATION, open_dataset, vocabulary_error


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
            entries: the blend (weights play no part here). Data sets without held-out documents have no part in this.
            sequence_length: tokens per window.
            max_sequences: serve only the first so many windows; None: all.

        Raises:
            DataError: a data set that does not open.
        """
        datasets = [open_dataset(entry.path) for entry in entries]
        self.tokenizer = datasets[0].tokenizer
        datasets = [dataset for dataset in datasets if dataset.manifest.splits[VALIDATION].num_documents]
        self.sequence_length = sequence_length
        self._paths = [dataset.path for dataset in datasets]
        self._documents = [dataset.open_split(VALIDATION) for dataset in datasets]
        # The documents' ids as they lie on disk: one document after the other.
        self._streams = [
            np.memmap(f"{dataset.prefix(VALIDATION)}.bin", documents.index.dtype, mode="r")
            for dataset, documents in zip(datasets, self._documents, strict=True)
        ]
        *self._starts, num_tokens = accumulate(map(len, self._streams), initial=0)
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
        # The last window may be cut short, and nothing stands before the first one but the id that is in place already.
        read = self._read(start - 1, start + self.sequence_length)
        ids = np.full(self.sequence_length + 1, self.tokenizer.eod, dtype=np.int64)
        first = int(start == 0)
        ids[first : first + len(read)] = read
        sequence = torch.from_numpy(ids)
        positions = torch.arange(self.sequence_length)
        return {
            "tokens": sequence[:-1],
            "labels": sequence[1:],
            "loss_mask": (positions < self.num_target_tokens - start).float(),
            "position_ids": positions,
        }

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ids [start, stop) of the concatenated streams, as far as there are any."""
        parts = []
        for number, (stream, offset) in enumerate(zip(self._streams, self._starts, strict=True)):
            part = stream[max(start - offset, 0) : max(stop - offset, 0)].astype(np.int64)
            if part.size and (part.min() < 0 or part.max() >= self.tokenizer.vocab_size):
                what, documents = f"{self._paths[number]}: held-out document", self._documents[number]
                raise vocabulary_error(what, documents, range(len(documents)), self.tokenizer.vocab_size)
            parts.append(part)
        return np.concatenate(parts)

    def _count_bytes(self, num_tokens: int) -> int:
        """UTF-8 bytes of the first tokens of the stream; exact but for a character that the last one cuts in two."""
        lengths = chain.from_iterable(documents.sequence_lengths for documents in self._documents)
        total = start = 0
        while start < num_tokens:
            stop = min(start + int(next(lengths)), num_tokens)
            total += len(self.tokenizer.decode_bytes(self._read(start, stop)))
            start = stop
        return total


def held_out_documents(entries: Sequence[DatasetEntry]) -> Iterator[bytes]:
    """UTF-8 bytes of each held-out document, in order, decoded from its ids.

    A tokenizer that normalises text gives the normalised one back; byte-level ones give every byte.
    """
    for entry in entries:
        dataset = open_dataset(entry.path)
        if not dataset.manifest.splits[VALIDATION].num_documents:
            continue
        for ids in dataset.open_split(VALIDATION):
            yield dataset.tokenizer.decode_bytes(ids)


def compression_baselines(entries: Sequence[DatasetEntry]) -> dict[str, float]:
    """Bits per byte of general compressors on the concatenated held-out documents, by command line."""
    compressors: dict[str, Any] = {
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
