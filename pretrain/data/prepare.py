"""From documents to a prepared data set: tokenise, split by document, write Megatron's indexed data sets."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parallel.machine.atomic_write import atomic_write
from pretrain.data.boundaries import boundary_near, cut
from pretrain.data.conversations import ConversationReader, MessagesField
from pretrain.data.files import SourceFile, list_files
from pretrain.data.hold_out import DrawnDocuments, HoldOut, mended
from pretrain.data.indexed_files import Document, IndexedWriter, Written, digests, read_written, text_bytes
from pretrain.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SPLITS,
    TRAIN,
    VALIDATION,
    Manifest,
    PreparedDataset,
    SplitInfo,
    UnscoredInfo,
    file_sha256,
    open_dataset,
)
from pretrain.data.scored import ScoredFile, scored_path
from pretrain.data.sources import (
    BadDocumentLog,
    PairFields,
    check_inputs_yielded,
    read_documents,
    read_records,
    refuse_kinds,
)
from pretrain.data.staging import LOCK_FILE, PROGRESS_FILE, recover_replaced, staged_folder
from pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer
from pretrain.data.workers import Tokenizing, tokenize_records
from pretrain.errors import DataError
from pretrain.progress import Progress

_OUR_FILES = frozenset(
    {
        MANIFEST_FILE,
        TOKENIZER_FILE,
        LOCK_FILE,
        *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx", "prompts", "scored")),
    }
)
_PROGRESS_FORMAT = 3
"""Format of what a preparation has written when it is cut off: 3 has bytes of each document that are not scored."""
NOTE_EVERY_S = 30.0
"""Seconds of work that a preparation which is cut off may have to do again."""


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
    as_text: bool = False,
    pair: PairFields | None = None,
    messages: MessagesField | None = None,
    validation_fraction: float = 0.01,
    validation_inputs: Sequence[str] = (),
    seed: int = 1,
    cut_documents: int | None = None,
    max_bad: int = 0,
    num_workers: int | None = None,
    overwrite: bool = False,
) -> PreparationResult:
    """Prepare a data set. If the same one is already there, it is returned as it is.

    Args:
        inputs: files, directories, or names of `INSTALLED`.
        output: folder to make; it appears when it is complete.
        field_name: JSON field, or column of a table, that holds the text.
        as_text: every file is text, whatever its name says.
        pair: JSON fields of a prompt and its answer instead: each pair is a document, of which the answer and its end are
            scored, and the prompt is not.
        messages: JSON field of the messages of a conversation instead: each conversation is a document, of which what the
            assistant says is scored. The tokenizer has the template by which it is read (`chat_tokenizer`).
        validation_fraction: share of the text held out, see `pretrain.data.hold_out`. 0: no validation.
        validation_inputs: hold out the documents of these instead, and none of the others.
        seed: decides which documents are held out.
        cut_documents: longer documents are cut into parts of at most so many characters, each a document; None: none.
        max_bad: bad documents to skip and count before giving up.
        num_workers: processes that tokenise; None: one per available core. The result does not depend on it.
        overwrite: replace the data set that is there, whatever it holds.

    Raises:
        DataError: bad input, an output that is taken, a full disk.
    """
    hold_out = HoldOut(tuple(validation_inputs), validation_fraction, seed)
    num_workers = len(os.sched_getaffinity(0)) if num_workers is None else num_workers
    if num_workers < 1:
        raise DataError(f"--workers {num_workers} is impossible: give 1 or more.")
    conversations = None if messages is None else ConversationReader.open(tokenizer, messages)
    tokenizing = Tokenizing(tokenizer, field_name, cut_documents, pair, conversations)
    all_inputs = [*inputs, *hold_out.inputs]
    files = list_files(all_inputs, as_text=as_text)
    job = _Job(all_inputs, len(inputs), files, tokenizing, hold_out, BadDocumentLog(max_bad), num_workers)
    what = "prompts and answers" if pair is not None else None if messages is None else "conversations"
    if what is not None and (other := next((file for file in job.files if file.kind != "json"), None)) is not None:
        raise DataError(f"{other.path}: {what} are read from JSON lines (.jsonl, .ndjson, .json) alone.")
    folder = Path(os.path.abspath(output))
    recover_replaced(folder)
    existing = _existing(folder, job.request_fingerprint, overwrite)
    if existing is not None:
        return PreparationResult(existing, was_already_there=True)
    refuse_kinds(files, job.left_out)

    def can_go_on(staging: Path) -> bool:
        return _Progress.read(staging, job.request_fingerprint) is not None

    with staged_folder(folder, can_go_on=can_go_on) as staging:
        splits = job.write(staging)
        tokenizer.save(staging)
        (staging / MANIFEST_FILE).write_text(job.manifest(splits).to_json(), encoding="utf-8")
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


@dataclass(frozen=True)
class Repeats:
    """Documents that are equal to others."""

    num_repeated: int = 0
    """Documents that are equal to another one, each but the first of its kind."""
    num_held_out_trained: int = 0
    """Held-out documents that are trained on as well."""

    @staticmethod
    def of(train: NDArray[np.uint64], held_out: NDArray[np.uint64], *, are_parted: bool) -> Repeats:
        """Repeats among the hashes of documents. `are_parted`: equal ones may stay on both sides."""
        everything = np.concatenate([train, held_out])
        return Repeats(
            len(everything) - len(np.unique(everything)), int(np.isin(held_out, train).sum()) if are_parted else 0
        )


@dataclass
class _Progress:
    """Progress of a preparation, noted now and then beside its output, so that one that is cut off can go on."""

    request_fingerprint: str
    format: int = 0
    num_records: int = 0
    file_bytes: int = 0
    num_documents: int = 0
    num_documents_per_input: list[int] = field(default_factory=list)
    written: dict[str, Written] = field(default_factory=dict)
    num_bad: int = 0
    examples: list[str] = field(default_factory=list)
    num_empty: int = 0

    @classmethod
    def read(cls, staging: Path, request_fingerprint: str) -> _Progress | None:
        """Noted progress of the same request; None if there is none."""
        try:
            fields = json.loads((staging / PROGRESS_FILE).read_text(encoding="utf-8"))
            fields["written"] = {split: Written(**values) for split, values in fields["written"].items()}
            found = cls(**fields)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        is_same = (found.request_fingerprint, found.format) == (request_fingerprint, _PROGRESS_FORMAT)
        return found if is_same else None

    def note(self, staging: Path) -> None:
        """Write the progress into the staging folder."""
        with atomic_write(staging / PROGRESS_FILE) as stream:
            stream.write(json.dumps(asdict(self)).encode())


@dataclass
class _Job:
    """The work of one preparation.

    Attributes:
        inputs: inputs of both kinds, those whose documents are held out last.
        num_inputs: number of inputs of the other kind.
    """

    inputs: Sequence[str]
    num_inputs: int
    files: Sequence[SourceFile]
    tokenizing: Tokenizing
    hold_out: HoldOut
    left_out: BadDocumentLog
    num_workers: int
    repeats: Repeats = field(default_factory=Repeats)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizing.tokenizer

    @property
    def as_text(self) -> bool:
        """True if every file is read as text, whatever its name says."""
        return any(file.kind == "raw" for file in self.files)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @cached_property
    def request_fingerprint(self) -> str:
        """sha256 over everything that decides the output."""
        request: list[object] = [FORMAT_VERSION, self.tokenizer.fingerprint, self.tokenizing.field_name]
        request += [self.hold_out.fraction, self.hold_out.seed]
        request += [[str(file.path.resolve()), file.size_bytes, file.mtime_ns, *file.read_as] for file in self.files]
        # Rarer arguments came later: requests without them keep the fingerprints that they had.
        if self.hold_out.inputs:
            request.append({"first_validation_input": self.num_inputs})
        if self.tokenizing.cut_documents is not None:
            request.append({"cut_documents": self.tokenizing.cut_documents})
        if self.tokenizing.pair is not None:
            request.append({"pair": asdict(self.tokenizing.pair)})
        if self.tokenizer.special_tokens:
            request.append({"special_tokens": True})
        if self.tokenizing.conversations is not None:
            assert self.tokenizer.chat is not None
            request.append(
                {"messages": asdict(self.tokenizing.conversations.field), "chat": asdict(self.tokenizer.chat)}
            )
        return hashlib.sha256(json.dumps(request).encode()).hexdigest()

    def manifest(self, splits: dict[str, SplitInfo]) -> Manifest:
        """Manifest of the splits that `write` has written."""
        pair, conversations = self.tokenizing.pair, self.tokenizing.conversations
        return Manifest(
            format_version=FORMAT_VERSION,
            tokenizer=self.tokenizer.info,
            splits=splits,
            sources={
                "inputs": list(self.inputs[: self.num_inputs]),
                "validation_inputs": list(self.hold_out.inputs),
                "num_files": len(self.files),
                "file_bytes": self.file_bytes,
                "field": self.tokenizing.field_name,
                "validation_fraction": self.hold_out.fraction,
                "seed": self.hold_out.seed,
                "cut_documents": self.tokenizing.cut_documents,
                **asdict(self.repeats),
                **({"as_text": True} if self.as_text else {}),
                **({} if pair is None else {"pair": asdict(pair)}),
                **({} if conversations is None else {"messages": asdict(conversations.field)}),
            },
            num_skipped=self.left_out.num_bad,
            skipped_examples=tuple(self.left_out.examples),
            num_empty=self.left_out.num_empty,
            request_fingerprint=self.request_fingerprint,
            versions={
                "python": platform.python_version(),
                "megatron-core": version("megatron-core"),
                "tokenizers": version("tokenizers"),
            },
        )

    def write(self, staging: Path) -> dict[str, SplitInfo]:
        """Write both splits, from where an earlier preparation was cut off if there was one."""
        progress = _Progress.read(staging, self.request_fingerprint)
        if progress is None:
            progress = _Progress(
                self.request_fingerprint, _PROGRESS_FORMAT, num_documents_per_input=[0] * len(self.inputs)
            )
        self.left_out.num_bad, self.left_out.num_empty = progress.num_bad, progress.num_empty
        self.left_out.examples[:] = progress.examples
        with ExitStack() as stack:
            writers = {
                split: stack.enter_context(self._writer(staging / split, progress.written.get(split)))
                for split in SPLITS
            }
            noted_at = time.monotonic()
            for _ in self._records(progress, writers):
                if time.monotonic() >= noted_at + NOTE_EVERY_S:
                    progress.written = {split: writer.sync() for split, writer in writers.items()}
                    progress.num_bad, progress.num_empty = self.left_out.num_bad, self.left_out.num_empty
                    progress.examples = self.left_out.examples
                    progress.note(staging)
                    noted_at = time.monotonic()
            check_inputs_yielded(self.inputs, progress.num_documents_per_input)
            for writer in writers.values():
                writer.sync()
            self.repeats = Repeats.of(
                *(digests(writers[split].prefix) for split in SPLITS), are_parted=not self.hold_out.is_drawn
            )
            if self.hold_out.is_drawn:
                writers = self._mend_shares(writers, stack, staging)
            for writer in writers.values():
                writer.finish()
        scoring = self.tokenizing.scoring
        splits = {split: _split_info(staging, split, writer.written, scoring) for split, writer in writers.items()}
        (staging / PROGRESS_FILE).unlink(missing_ok=True)
        for writer in writers.values():
            writer.file(".lengths").unlink()
        return splits

    def _writer(self, prefix: Path, written: Written | None = None) -> IndexedWriter:
        return IndexedWriter(prefix, self.tokenizer.token_dtype, written, scoring=self.tokenizing.scoring)

    def _records(self, progress: _Progress, writers: dict[str, IndexedWriter]) -> Iterator[None]:
        """Write the documents of one record after the other, counting them in `progress`, under a progress bar."""
        records = itertools.islice(read_records(self.files, self.tokenizing.field_name), progress.num_records, None)
        with Progress(
            "tokenising", total=self.file_bytes, initial=progress.file_bytes, is_bytes=True, leave=False
        ) as bar:
            for record in tokenize_records(records, self.tokenizing, self.num_workers):
                if record.bad_reason is not None:
                    self.left_out.add(record.origin, record.bad_reason)
                elif not record.documents:
                    self.left_out.num_empty += 1
                for document in record.documents:
                    held_out = self.hold_out.takes(progress.num_documents, record.input_index, self.num_inputs)
                    writer = writers[VALIDATION if held_out else TRAIN]
                    writer.add(*document)
                    self._check_ids(writer.written.max_token_id, record.origin)
                    progress.num_documents += 1
                    progress.num_documents_per_input[record.input_index] += 1
                progress.num_records += 1
                progress.file_bytes += record.file_bytes
                bar.update(record.file_bytes)
                yield

    def _check_ids(self, largest: int, origin: str) -> None:
        if largest >= self.tokenizer.vocab_size:
            raise DataError(
                f"{origin}: the tokenizer gave id {largest}, past its own vocabulary of {self.tokenizer.vocab_size}. "
                "Mend its tokenizer.json."
            )

    def _drawn(self, writers: dict[str, IndexedWriter]) -> DrawnDocuments:
        """The documents that were written, in their order, and which of them were drawn."""
        number = sum(writer.written.num_documents for writer in writers.values())
        held_out = np.array([self.hold_out.takes(index, 0, 1) for index in range(number)], dtype=np.bool_)
        sizes, hashes = np.empty(number, dtype=np.int64), np.empty(number, dtype=np.uint64)
        for split, places in ((TRAIN, ~held_out), (VALIDATION, held_out)):
            sizes[places], hashes[places] = text_bytes(writers[split].prefix), digests(writers[split].prefix)
        return DrawnDocuments(held_out, sizes, hashes)

    def _mend_shares(
        self, writers: dict[str, IndexedWriter], stack: ExitStack, staging: Path
    ) -> dict[str, IndexedWriter]:
        """Divide the documents anew where those drawn are not about as much of the text as was asked for, or equal ones
        were parted."""
        documents, scoring = self._drawn(writers), self.tokenizing.scoring
        division = mended(self.hold_out, documents, can_cut=scoring is None)
        if division is None:
            return writers
        # From here on, a preparation that is cut off starts anew.
        (staging / PROGRESS_FILE).unlink(missing_ok=True)
        endings = (".bin", ".lengths", *([] if scoring is None else [f".{scoring}"]))
        drawn = {}
        for split, writer in writers.items():
            writer.close()
            prefix = staging / f"drawn-{split}"
            for ending in endings:
                writer.file(ending).rename(prefix.with_name(prefix.name + ending))
            drawn[split] = prefix
        written = {split: read_written(prefix, self.tokenizer.token_dtype, scoring) for split, prefix in drawn.items()}
        writers = {split: stack.enter_context(self._writer(writer.prefix)) for split, writer in writers.items()}
        for index, (was_held_out, text) in enumerate(zip(documents.held_out, documents.texts, strict=True)):
            document = next(written[VALIDATION if was_held_out else TRAIN])
            if text == division.cut:
                for split, part in zip(SPLITS, self._cut(index, division.cut_share), strict=True):
                    writers[split].add(*part)
            else:
                writers[VALIDATION if int(text) in division.held_out else TRAIN].add(*document)
        for prefix in drawn.values():
            for ending in endings:
                prefix.with_name(prefix.name + ending).unlink()
        return writers

    def _cut(self, index: int, share: float) -> Iterator[Document]:
        """The two parts of a document, of which the end has a share of it."""
        skipping, most = BadDocumentLog(self.left_out.limit), self.tokenizing.cut_documents
        texts = read_documents(
            self.inputs, field_name=self.tokenizing.field_name, as_text=self.as_text, bad_documents=skipping
        )
        documents = (part for text in texts for part in (cut(text, most) if most else [text]))
        text = next(itertools.islice(documents, index, None))
        try:
            end = boundary_near(text, round(len(text) * (1 - share)))
        except ValueError as error:
            raise DataError(
                "There is only one document, of one character, and training and validation need one each: add "
                "documents, or leave validation out with --validation-fraction 0."
            ) from error
        eod = np.array([self.tokenizer.eod], dtype=self.tokenizer.token_dtype)
        parts = [text[:end], text[end:]]
        for part, ids in zip(parts, self.tokenizer.tokenize_batch(parts), strict=True):
            yield Document(np.concatenate([ids, eod]), len(part.encode("utf-8")))


def _split_info(folder: Path, split: str, written: Written, scoring: ScoredFile | None) -> SplitInfo:
    """The manifest's entry, with the hashes of the files."""
    data, index = (folder / f"{split}.{ending}" for ending in ("bin", "idx"))
    unscored = {}
    if scoring is not None:
        file = scored_path(folder / split, scoring)
        unscored[scoring] = UnscoredInfo(
            written.unscored_tokens, written.unscored_bytes, file.stat().st_size, file_sha256(file)
        )
    return SplitInfo(
        num_documents=written.num_documents,
        num_tokens=written.num_tokens,
        num_bytes=written.num_bytes,
        max_token_id=written.max_token_id,
        bin_bytes=data.stat().st_size,
        bin_sha256=file_sha256(data),
        idx_bytes=index.stat().st_size,
        idx_sha256=file_sha256(index),
        prompts=unscored.get("prompts"),
        scored=unscored.get("scored"),
    )
