"""From documents to a prepared data set: tokenise, split by document, write Megatron's indexed data sets."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

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
    tokenizer_info,
)
from pretrain.data.sources import BadDocumentLog, SourceFile, check_inputs_yielded, list_files, read_records
from pretrain.data.staging import LOCK_FILE, recover_replaced, staged_folder
from pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer
from pretrain.data.workers import TokenizedRecord, tokenize_records
from pretrain.errors import DataError

_OUR_FILES = frozenset(
    {MANIFEST_FILE, TOKENIZER_FILE, LOCK_FILE, *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx"))}
)


@dataclass(frozen=True)
class PreparationRequest:
    """What is to be prepared. Equal requests on equal files give equal data sets, whatever the number of workers."""

    inputs: tuple[str, ...]
    """Files, directories, or `python-stdlib`."""
    tokenizer: Tokenizer
    field_name: str = "text"
    """JSON field or parquet column that holds the text."""
    validation_fraction: float = 0.01
    """Expected share of the documents that are held out."""
    seed: int = 1
    """Decides which documents are held out."""
    max_bad: int = 0
    """Bad documents to skip and count before giving up."""

    def check(self) -> None:
        """Raises DataError for arguments that cannot work."""
        if not 0.0 < self.validation_fraction < 1.0:
            raise DataError(
                f"A validation fraction of {self.validation_fraction} is impossible: give one between 0 and 1, "
                "such as 0.01."
            )
        if self.max_bad < 0:
            raise DataError(f"--max-bad {self.max_bad} is impossible: give 0 or more.")

    def fingerprint(self, files: Sequence[SourceFile]) -> str:
        """sha256 over the arguments and the files (path, size, modification time)."""
        parts: list[Any] = [
            FORMAT_VERSION,
            self.tokenizer.fingerprint,
            self.field_name,
            self.validation_fraction,
            self.seed,
        ]
        parts += [[str(file.path.resolve()), file.size_bytes, file.mtime_ns] for file in files]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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
    progress: bool = True,
) -> PreparationResult:
    """Prepare a data set. If the same one is already there, it is returned as it is.

    Args:
        inputs: files, directories, or `python-stdlib`.
        output: folder to make; it appears when it is complete.
        tokenizer: makes the ids.
        field_name: JSON field or parquet column that holds the text.
        validation_fraction: expected share of the documents held out; at least one document is, and at least one is
            not.
        seed: decides which documents are held out.
        max_bad: bad documents to skip and count before giving up.
        num_workers: processes that tokenise; None: one per available core. The result does not depend on it.
        overwrite: replace the data set that is there, whatever it holds.
        progress: show a progress bar on a terminal.

    Raises:
        DataError: bad input, an output that is taken, a full disk.
    """
    request = PreparationRequest(tuple(inputs), tokenizer, field_name, validation_fraction, seed, max_bad)
    request.check()
    num_workers = len(os.sched_getaffinity(0)) if num_workers is None else num_workers
    if num_workers < 1:
        raise DataError(f"--workers {num_workers} is impossible: give 1 or more.")
    folder = Path(os.path.abspath(output))
    files = list_files(inputs)
    recover_replaced(folder)
    existing = _existing(folder, request.fingerprint(files), overwrite)
    if existing is not None:
        return PreparationResult(existing, was_already_there=True)
    with staged_folder(folder) as staging:
        _build(staging, request, files, num_workers, progress)
    return PreparationResult(open_dataset(folder), was_already_there=False)


def _existing(folder: Path, request_fingerprint: str, overwrite: bool) -> PreparedDataset | None:
    """The data set that is there, if it is the one asked for. Raises DataError if anything else is in the way."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    strangers = (
        sorted(path.name for path in folder.iterdir() if path.name not in _OUR_FILES)
        if folder.is_dir()
        else [folder.name]
    )
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


def held_out_score(seed: int, document_index: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments; documents with the lowest scores are held out."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, document_index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


class _SplitWriter:
    """Writes one split and counts what goes in."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.folder = folder
        self.split = split
        self._builder = IndexedDatasetBuilder(str(folder / f"{split}.bin"), dtype=tokenizer.token_dtype)
        self.num_documents = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self.max_token_id = 0
        self.extreme_score: tuple[float, int, int] | None = None
        """Score, position and text bytes of the document that would move if the other split stayed empty."""

    def add(self, ids: NDArray[Any], text_bytes: int, score: float) -> None:
        """Append a document (ids end with the end-of-document id)."""
        # Towards the other side's scores: low scores are held out.
        key = score if self.split == TRAIN else -score
        if self.extreme_score is None or key < self.extreme_score[0]:
            self.extreme_score = (key, self.num_documents, text_bytes)
        self._builder.add_document(ids, [len(ids)])
        self.num_documents += 1
        self.num_tokens += len(ids)
        self.num_bytes += text_bytes
        self.max_token_id = max(self.max_token_id, int(ids.max()))

    def finish(self) -> None:
        """Write the index; the split is complete on disk."""
        self._builder.finalize(str(self.folder / f"{self.split}.idx"))

    def abandon(self) -> None:
        """Let go of the open file, without an index."""
        self._builder.data_file.close()

    def info(self) -> SplitInfo:
        """The manifest's entry, with the hashes of what was written."""
        bin_path, idx_path = self.folder / f"{self.split}.bin", self.folder / f"{self.split}.idx"
        return SplitInfo(
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            max_token_id=self.max_token_id,
            bin_bytes=bin_path.stat().st_size,
            bin_sha256=file_sha256(bin_path),
            idx_bytes=idx_path.stat().st_size,
            idx_sha256=file_sha256(idx_path),
        )


@dataclass
class _Counts:
    """What was seen on the way."""

    num_documents_per_input: list[int]
    bad: BadDocumentLog
    num_empty: int = 0
    num_documents: int = 0


def _build(
    folder: Path, request: PreparationRequest, files: Sequence[SourceFile], num_workers: int, progress: bool
) -> None:
    """Fill the folder, the manifest last."""
    counts = _Counts([0] * len(request.inputs), BadDocumentLog(request.max_bad))
    writers = {split: _SplitWriter(folder, split, request.tokenizer) for split in SPLITS}
    records = read_records(files, request.field_name)
    tokenized = tokenize_records(records, request.tokenizer, request.field_name, num_workers)
    total_bytes = sum(file.size_bytes for file in files)
    try:
        _write_documents(_with_progress(tokenized, total_bytes, progress), writers, request, counts)
        check_inputs_yielded(request.inputs, counts.num_documents_per_input)
        for writer in writers.values():
            writer.finish()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    _ensure_both_splits(folder, writers, request.tokenizer)
    request.tokenizer.save(folder)
    manifest = _manifest(request, files, writers, counts)
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")


def _write_documents(
    tokenized: Iterable[TokenizedRecord], writers: dict[str, _SplitWriter], request: PreparationRequest, counts: _Counts
) -> None:
    for result in tokenized:
        if result.bad_reason is not None:
            counts.bad.add(result.origin, result.bad_reason)
        elif result.ids is None:
            counts.num_empty += 1
        else:
            _check_vocabulary(result, request.tokenizer)
            score = held_out_score(request.seed, counts.num_documents)
            split = VALIDATION if score < request.validation_fraction else TRAIN
            writers[split].add(result.ids, result.text_bytes, score)
            counts.num_documents += 1
            counts.num_documents_per_input[result.input_index] += 1


def _check_vocabulary(result: TokenizedRecord, tokenizer: Tokenizer) -> None:
    assert result.ids is not None
    largest = int(result.ids.max())
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"{result.origin}: the tokenizer gave id {largest}, past its own vocabulary of {tokenizer.vocab_size}. "
            "Mend its tokenizer.json."
        )


def _ensure_both_splits(folder: Path, writers: dict[str, _SplitWriter], tokenizer: Tokenizer) -> None:
    """Give an empty split the document nearest to it, so that a small corpus can be trained on and evaluated."""
    empty = next((split for split in SPLITS if writers[split].num_documents == 0), None)
    if empty is None:
        return
    full = VALIDATION if empty == TRAIN else TRAIN
    if writers[full].num_documents < 2:
        raise DataError(
            "There is only one document, and training and validation need one each. Add documents, or cut it in two."
        )
    nearest = writers[full].extreme_score
    assert nearest is not None
    _, moved, moved_bytes = nearest
    _rewrite_without(folder, writers, full, empty, moved, moved_bytes, tokenizer)


def _rewrite_without(
    folder: Path,
    writers: dict[str, _SplitWriter],
    full: str,
    empty: str,
    moved: int,
    moved_bytes: int,
    tokenizer: Tokenizer,
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    old = writers[full]
    for suffix in ("bin", "idx"):
        (folder / f"{full}.{suffix}").rename(folder / f"old.{suffix}")
    documents = IndexedDataset(str(folder / "old"))
    writers[full], writers[empty] = _SplitWriter(folder, full, tokenizer), _SplitWriter(folder, empty, tokenizer)
    for index in range(len(documents)):
        if index == moved:
            writers[empty].add(documents[index], moved_bytes, 0.0)
        else:
            writers[full].add(documents[index], 0, 0.0)
    # Text bytes per document are not stored, so the remainder keeps the sum.
    writers[full].num_bytes = old.num_bytes - moved_bytes
    for writer in writers.values():
        writer.finish()
    del documents
    for suffix in ("bin", "idx"):
        (folder / f"old.{suffix}").unlink()


def _manifest(
    request: PreparationRequest, files: Sequence[SourceFile], writers: dict[str, _SplitWriter], counts: _Counts
) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        tokenizer=tokenizer_info(request.tokenizer),
        splits={split: writers[split].info() for split in SPLITS},
        sources={
            "inputs": list(request.inputs),
            "num_files": len(files),
            "file_bytes": sum(file.size_bytes for file in files),
            "field": request.field_name,
            "validation_fraction": request.validation_fraction,
            "seed": request.seed,
        },
        num_skipped=counts.bad.num_bad,
        skipped_examples=tuple(counts.bad.examples),
        num_empty=counts.num_empty,
        request_fingerprint=request.fingerprint(files),
        versions={
            "python": platform.python_version(),
            "megatron-core": version("megatron-core"),
            "tokenizers": version("tokenizers"),
        },
    )


def _with_progress(tokenized: Iterable[TokenizedRecord], total_bytes: int, progress: bool) -> Iterable[TokenizedRecord]:
    from tqdm import tqdm

    with tqdm(
        total=total_bytes, unit="B", unit_scale=True, desc="tokenising", disable=None if progress else True
    ) as bar:
        for result in tokenized:
            yield result
            bar.update(result.file_bytes)
