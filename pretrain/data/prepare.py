"""From documents to a prepared data set: tokenise, split by document, write Megatron's indexed data sets."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from tqdm import tqdm

from pretrain.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SPLITS,
    TRAIN,
    VALIDATION,
    Manifest,
    PreparedDataset,
    SplitInfo,
    file_sha256,
    open_dataset,
)
from pretrain.data.sources import BadDocumentLog, check_inputs_yielded, list_files, read_records
from pretrain.data.staging import LOCK_FILE, recover_replaced, staged_folder
from pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer
from pretrain.data.workers import TokenizedRecord, tokenize_records
from pretrain.errors import DataError

_OUR_FILES = frozenset(
    {MANIFEST_FILE, TOKENIZER_FILE, LOCK_FILE, *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx"))}
)


@dataclass(frozen=True)
class PreparationResult:
    """A complete data set, and whether this call made it or found it."""

    dataset: PreparedDataset
    was_already_there: bool


def prepare(
    inputs: Sequence[str],
    output: str | Path,
    tokenizer: Tokenizer,
    *,
    field_name: str = "text",
    validation_fraction: float = 0.01,
    seed: int = 1,
    max_bad: int = 0,
    num_workers: int | None = None,
    overwrite: bool = False,
) -> PreparationResult:
    """Prepare a data set. If the same one is already there, it is returned as it is.

    Args:
        inputs: files, directories, or names of `INSTALLED`.
        output: folder to make; it appears when it is complete.
        field_name: JSON field or parquet column that holds the text.
        validation_fraction: expected share of the documents held out; at least one document is, and at least one is
            not.
        seed: decides which documents are held out.
        max_bad: bad documents to skip and count before giving up.
        num_workers: processes that tokenise; None: one per available core. The result does not depend on it.
        overwrite: replace the data set that is there, whatever it holds.

    Raises:
        DataError: bad input, an output that is taken, a full disk.
    """
    if not 0.0 < validation_fraction < 1.0:
        raise DataError(
            f"A validation fraction of {validation_fraction} is impossible: give one between 0 and 1, such as 0.01."
        )
    if max_bad < 0:
        raise DataError(f"--max-bad {max_bad} is impossible: give 0 or more.")
    num_workers = len(os.sched_getaffinity(0)) if num_workers is None else num_workers
    if num_workers < 1:
        raise DataError(f"--workers {num_workers} is impossible: give 1 or more.")
    folder = Path(os.path.abspath(output))
    files = list_files(inputs)
    request = [FORMAT_VERSION, tokenizer.fingerprint, field_name, validation_fraction, seed]
    request += [[str(file.path.resolve()), file.size_bytes, file.mtime_ns] for file in files]
    request_fingerprint = hashlib.sha256(json.dumps(request).encode()).hexdigest()
    recover_replaced(folder)
    existing = _existing(folder, request_fingerprint, overwrite)
    if existing is not None:
        return PreparationResult(existing, was_already_there=True)
    left_out = BadDocumentLog(max_bad)
    file_bytes = sum(file.size_bytes for file in files)
    with staged_folder(folder) as staging:
        tokenized = tokenize_records(read_records(files, field_name), tokenizer, field_name, num_workers)
        documents = _documents(tokenized, file_bytes, inputs, left_out, tokenizer.vocab_size)
        splits = _write_splits(staging, tokenizer, documents, validation_fraction, seed)
        tokenizer.save(staging)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            tokenizer=tokenizer.info,
            splits=splits,
            sources={
                "inputs": list(inputs),
                "num_files": len(files),
                "file_bytes": file_bytes,
                "field": field_name,
                "validation_fraction": validation_fraction,
                "seed": seed,
            },
            num_skipped=left_out.num_bad,
            skipped_examples=tuple(left_out.examples),
            num_empty=left_out.num_empty,
            request_fingerprint=request_fingerprint,
            versions={
                "python": platform.python_version(),
                "megatron-core": version("megatron-core"),
                "tokenizers": version("tokenizers"),
            },
        )
        (staging / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return PreparationResult(open_dataset(folder), was_already_there=False)


def _existing(folder: Path, request_fingerprint: str, overwrite: bool) -> PreparedDataset | None:
    """The data set that is there, if it is the one asked for. Raises DataError if anything else is in the way."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    strangers = sorted(set(os.listdir(folder)) - _OUR_FILES) if folder.is_dir() else [folder.name]
    if strangers:
        # --overwrite must never delete a folder that happens to have the wrong name.
        raise DataError(
            f"{folder} exists and is not a prepared data set (it holds {strangers[0]}). Choose another --output."
        )
    if overwrite:
        return None
    dataset = open_dataset(folder)
    if dataset.manifest.request_fingerprint != request_fingerprint:
        raise DataError(
            f"{folder} holds a data set made from other files or with other arguments. "
            f"Choose another --output, or pass --overwrite to replace it."
        )
    return dataset


def _documents(
    tokenized: Iterable[TokenizedRecord],
    file_bytes: int,
    inputs: Sequence[str],
    left_out: BadDocumentLog,
    vocab_size: int,
) -> Iterator[tuple[NDArray[Any], int]]:
    """The ids of each document and the bytes of its text, in order, under a progress bar."""
    num_documents_per_input = [0] * len(inputs)
    with tqdm(total=file_bytes, unit="B", unit_scale=True, desc="tokenising", disable=None) as bar:
        for record in tokenized:
            if record.bad_reason is not None:
                left_out.add(record.origin, record.bad_reason)
            elif record.ids is None:
                left_out.num_empty += 1
            elif (largest := int(record.ids.max())) >= vocab_size:
                raise DataError(
                    f"{record.origin}: the tokenizer gave id {largest}, past its own vocabulary of {vocab_size}. "
                    "Mend its tokenizer.json."
                )
            else:
                num_documents_per_input[record.input_index] += 1
                yield record.ids, record.text_bytes
            bar.update(record.file_bytes)
    check_inputs_yielded(inputs, num_documents_per_input)


def held_out_score(seed: int, document_index: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments; documents with the lowest scores are held out."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, document_index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


class _SplitWriter:
    """Writes one split and counts what goes in."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._bin, self._idx = folder / f"{split}.bin", folder / f"{split}.idx"
        self._builder = IndexedDatasetBuilder(str(self._bin), dtype=tokenizer.token_dtype)
        self.data_file = self._builder.data_file
        self.text_bytes = array("q")
        """Of each document."""
        self._max_token_id = 0

    def add(self, ids: NDArray[Any], text_bytes: int) -> None:
        """Append a document (ids end with the end-of-document id)."""
        self._builder.add_document(ids, [len(ids)])
        self.text_bytes.append(text_bytes)
        self._max_token_id = max(self._max_token_id, int(ids.max()))

    def finish(self) -> None:
        """Write the index; the split is complete on disk."""
        self._builder.finalize(str(self._idx))

    def info(self) -> SplitInfo:
        """The manifest's entry, with the hashes of what was written."""
        return SplitInfo(
            num_documents=len(self.text_bytes),
            num_tokens=sum(self._builder.sequence_lengths),
            num_bytes=sum(self.text_bytes),
            max_token_id=self._max_token_id,
            bin_bytes=self._bin.stat().st_size,
            bin_sha256=file_sha256(self._bin),
            idx_bytes=self._idx.stat().st_size,
            idx_sha256=file_sha256(self._idx),
        )


def _write(
    folder: Path, tokenizer: Tokenizer, documents: Iterable[tuple[str, NDArray[Any], int]]
) -> dict[str, _SplitWriter]:
    """Write documents, each given as its split, its ids and the bytes of its text."""
    writers = {split: _SplitWriter(folder, split, tokenizer) for split in SPLITS}
    with writers[TRAIN].data_file, writers[VALIDATION].data_file:
        for split, ids, text_bytes in documents:
            writers[split].add(ids, text_bytes)
        for writer in writers.values():
            writer.finish()
    return writers


def _write_splits(
    folder: Path,
    tokenizer: Tokenizer,
    documents: Iterable[tuple[NDArray[Any], int]],
    validation_fraction: float,
    seed: int,
) -> dict[str, SplitInfo]:
    """Write both splits.

    One that would stay empty gets the document nearest to it, so that a small corpus can be trained on and evaluated.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    chosen = (
        (VALIDATION if held_out_score(seed, number) < validation_fraction else TRAIN, ids, text_bytes)
        for number, (ids, text_bytes) in enumerate(documents)
    )
    writers = _write(folder, tokenizer, chosen)
    for full, empty, nearest in ((TRAIN, VALIDATION, min), (VALIDATION, TRAIN, max)):
        if writers[empty].text_bytes:
            continue
        text_bytes = writers[full].text_bytes
        if len(text_bytes) < 2:
            raise DataError(
                "There is only one document, and training and validation need one each. "
                "Add documents, or cut it in two."
            )
        # All documents are here, so that their places are their numbers.
        moved = nearest(range(len(text_bytes)), key=lambda number: held_out_score(seed, number))
        for suffix in ("bin", "idx"):
            (folder / f"{full}.{suffix}").rename(folder / f"old.{suffix}")
        old = IndexedDataset(str(folder / "old"))
        chosen = ((empty if number == moved else full, old[number], text_bytes[number]) for number in range(len(old)))
        writers = _write(folder, tokenizer, chosen)
        for suffix in ("bin", "idx"):
            (folder / f"old.{suffix}").unlink()
    return {split: writer.info() for split, writer in writers.items()}
