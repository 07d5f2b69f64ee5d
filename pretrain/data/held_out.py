"""The held-out documents of a blend: every token predicted once, with its domain, and the number of bytes."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megamem.attention.documents import document_positions
from pretrain.config.schema import DatasetEntry, EvaluationEntry
from pretrain.data.blend import domain_names
from pretrain.data.manifest import TRAIN, VALIDATION, PreparedDataset, open_dataset, vocabulary_error
from pretrain.data.scored import runs_of

Entries = Sequence[DatasetEntry | EvaluationEntry]


@dataclass(frozen=True)
class Domain:
    """The part of a domain's held-out documents that is predicted: of prompts and answers the answers, of conversations
    the assistant's turns.

    Attributes:
        num_target_tokens: end-of-document tokens included.
        num_bytes: UTF-8 bytes of their text.
    """

    name: str
    num_target_tokens: int
    num_bytes: int


def evaluated_parts(entries: Entries) -> list[tuple[PreparedDataset, str, str]]:
    """Data sets that have a part in evaluation, each with the split that is read and its domain.

    The split is that of the documents held out. A data set that is there for evaluation may have none: then it is read
    whole.

    Raises:
        DataError: a data set does not open.
    """
    parts = []
    for entry, name in zip(entries, domain_names(entries), strict=True):
        dataset = open_dataset(entry.path)
        if dataset.manifest.splits[VALIDATION].num_documents:
            parts.append((dataset, VALIDATION, name))
        elif isinstance(entry, EvaluationEntry):
            parts.append((dataset, TRAIN, name))
    return parts


class HeldOutDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows over the held-out documents of all entries, one after the other.

    Every held-out token is the target of exactly one position, the very first one included: an end-of-document token
    stands before it, as it does before every other document. So the summed loss codes the whole text, and can be set
    against its bytes. The last window is padded with positions whose `loss_mask` is 0. The `loss_mask` is 0 too where
    the target is not scored: of prompts and answers the answers are coded.

    `num_target_tokens` counts end-of-document tokens and `num_bytes` does not: the model pays for saying where a
    document ends, the text has no byte for it. Bits per byte so defined are never flattered.

    Where documents are of several `domains`, a window has the domain of each target.
    """

    def __init__(
        self,
        entries: Entries,
        sequence_length: int,
        max_sequences: int | None = None,
        *,
        separate_documents: bool = False,
    ) -> None:
        """Open the windows.

        Args:
            entries: the blend (weights play no part here), whose data sets without held-out documents have no part in
                this, or data sets to evaluate on, of which all documents are read if none is held out.
            sequence_length: tokens per window.
            max_sequences: serve only the first so many windows; None: all.
            separate_documents: positions start anew at every document.

        Raises:
            DataError: a data set that does not open.
        """
        parts = evaluated_parts(entries)
        self.tokenizer = open_dataset(entries[0].path).tokenizer
        self.sequence_length = sequence_length
        self._separate_documents = separate_documents
        self._paths = [dataset.path for dataset, _, _ in parts]
        self._documents = [dataset.open_split(split) for dataset, split, _ in parts]
        # The documents' ids as they lie on disk: one document after the other.
        self._streams = [
            np.memmap(f"{dataset.prefix(split)}.bin", documents.index.dtype, mode="r")
            for (dataset, split, _), documents in zip(parts, self._documents, strict=True)
        ]
        self._scored = [dataset.open_scored(split) for dataset, split, _ in parts]
        *self._starts, num_tokens = accumulate(map(len, self._streams), initial=0)
        num_windows = -(-num_tokens // sequence_length)
        if max_sequences is None or max_sequences >= num_windows:
            self._num_windows, self._num_tokens = num_windows, num_tokens
            num_bytes = [dataset.manifest.splits[split].num_scored_bytes for dataset, split, _ in parts]
        else:
            self._num_windows, self._num_tokens = max_sequences, max_sequences * sequence_length
            num_bytes = self._count_bytes(self._num_tokens)
        read = (
            max(0, min(start + len(stream), self._num_tokens) - start)
            for start, stream in zip(self._starts, self._streams, strict=True)
        )
        num_targets = [
            num if scored is None else scored.count(num) for num, scored in zip(read, self._scored, strict=True)
        ]
        self.num_target_tokens, self.num_bytes = sum(num_targets), sum(num_bytes)
        self.domains, self._domain_of_stream = self._domains([name for _, _, name in parts], num_targets, num_bytes)

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
        window = {
            "tokens": sequence[:-1],
            "labels": sequence[1:],
            "loss_mask": torch.from_numpy(self._counts(start).astype(np.float32)),
            "position_ids": (
                document_positions(sequence[:-1], self.tokenizer.eod) if self._separate_documents else positions
            ),
        }
        if len(self.domains) > 1:
            streams = np.searchsorted(self._starts, start + positions.numpy(), side="right") - 1
            window["domains"] = torch.from_numpy(self._domain_of_stream[streams])
        return window

    def _counts(self, start: int) -> NDArray[np.bool_]:
        """Flags of the targets of the window that begins at a token of all streams: True where one counts."""
        counts = np.zeros(self.sequence_length, dtype=np.bool_)
        for offset, stream, scored in zip(self._starts, self._streams, self._scored, strict=True):
            low, high = max(start, offset), min(start + self.sequence_length, offset + len(stream))
            if low < high:
                flags = True if scored is None else scored.flags(low - offset, high - offset)
                counts[low - start : high - start] = flags
        return counts

    def _domains(
        self, names: list[str], num_targets: list[int], num_bytes: list[int]
    ) -> tuple[list[Domain], NDArray[np.int64]]:
        """The domains with a predicted target, and the number of each stream's domain."""
        found: dict[str, Domain] = {}
        for name, num_tokens, size in zip(names, num_targets, num_bytes, strict=True):
            if num_tokens:
                before = found.get(name, Domain(name, 0, 0))
                found[name] = Domain(name, before.num_target_tokens + num_tokens, before.num_bytes + size)
        numbers = {name: number for number, name in enumerate(found)}
        # A stream past the last window has no target, and any number will do.
        return list(found.values()), np.array([numbers.get(name, 0) for name in names], dtype=np.int64)

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

    def _count_bytes(self, num_tokens: int) -> list[int]:
        """Per stream, UTF-8 bytes of the scored tokens among the first ones of all; exact but for a character that the
        last one cuts in two.
        """
        counts = [0] * len(self._documents)
        for number, (offset, documents) in enumerate(zip(self._starts, self._documents, strict=True)):
            start, scored = offset, self._scored[number]
            for length in documents.sequence_lengths:
                stop = min(start + int(length), num_tokens)
                if start >= stop:
                    return counts
                flags = (
                    np.ones(stop - start, np.bool_) if scored is None else scored.flags(start - offset, stop - offset)
                )
                # The text of some tokens is that of all up to them without those before: tokens have none of their own.
                for first, end in runs_of(flags):
                    counts[number] += self._num_text_bytes(start, start + end) - self._num_text_bytes(
                        start, start + first
                    )
                start = stop
        return counts

    def _num_text_bytes(self, start: int, stop: int) -> int:
        return len(self.tokenizer.decode_bytes(self._read(start, stop)))


def held_out_documents(entries: Entries) -> Iterator[bytes]:
    """UTF-8 bytes of each held-out document, in order, decoded from its ids.

    A tokenizer that normalises text gives the normalised one back; byte-level ones give every byte.
    """
    for dataset, split, _ in evaluated_parts(entries):
        for ids in dataset.open_split(split):
            yield dataset.tokenizer.decode_bytes(ids)


def compression_baselines(entries: Entries) -> dict[str, float]:
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
