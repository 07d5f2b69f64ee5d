"""Tokenising records in other processes, in source order, whatever their number."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from parallel.processes.parent_death import signal_on_parent_death
from pretrain.data.boundaries import cut
from pretrain.data.conversations import ConversationReader, MarkedText
from pretrain.data.indexed_files import Document
from pretrain.data.scored import ScoredFile
from pretrain.data.sources import BadDocument, PairFields, SourceRecord, decode, decode_messages, decode_pair
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError

_MAX_BATCH_BYTES = 1 << 20
_MAX_BATCH_RECORDS = 256


@dataclass(frozen=True)
class TokenizedRecord:
    """Result of a record: documents (none if it is empty), or the reason that it is bad.

    Attributes:
        documents: documents of the record.
    """

    origin: str
    input_index: int
    file_bytes: int
    documents: tuple[Document, ...] = ()
    bad_reason: str | None = None


@dataclass(frozen=True)
class Tokenizing:
    """Settings by which records become documents.

    Attributes:
        field_name: JSON field that holds the text.
        cut_documents: longer texts are cut into documents of at most so many characters; None: none is.
        pair: the fields of a prompt and its answer, which are one document; None: records hold none.
        conversations: the reader of conversations, of which each is a document; None: records hold none.
    """

    tokenizer: Tokenizer
    field_name: str
    cut_documents: int | None = None
    pair: PairFields | None = None
    conversations: ConversationReader | None = None

    def __post_init__(self) -> None:
        if self.cut_documents is not None and self.cut_documents < 2:
            raise DataError(f"--cut-documents {self.cut_documents} is impossible: give at least 2 characters.")
        if self.cut_documents is not None and self.pair is not None:
            raise DataError("--cut-documents would part answers from their prompts: leave it out, or --prompt-field.")
        if self.cut_documents is not None and self.conversations is not None:
            raise DataError("--cut-documents would cut conversations in two: leave it out, or --messages-field.")

    @property
    def scoring(self) -> ScoredFile | None:
        """The file that says which tokens are scored; None: all are."""
        return "prompts" if self.pair is not None else None if self.conversations is None else "scored"


def tokenize_records(records: Iterable[SourceRecord], how: Tokenizing, num_workers: int) -> Iterator[TokenizedRecord]:
    """Decode and tokenise records, in order.

    Args:
        num_workers: processes; 1 works in this one.

    Raises:
        DataError: a worker was killed.
    """
    batches = _batches(records)
    if num_workers == 1:
        for batch in batches:
            yield from _tokenize_batch(batch, how)
        return
    # Spawned, not forked: the parent may have threads by now (torch, pyarrow, the tokenizers package), and a forked
    # lock never opens.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (how, os.getpid()))
    # A batch in work and one in waiting for each worker, so that memory is bounded and none waits.
    pending = deque[tuple[str, Future[list[TokenizedRecord]]]]()
    try:
        for batch in batches:
            # The first document whose ids are not back yet, for the case that they never come.
            origin = pending[0][0] if pending else batch[0].origin
            pending.append((batch[0].origin, pool.submit(_tokenize_in_worker, batch)))
            if len(pending) == 2 * num_workers:
                origin, future = pending.popleft()
                yield from future.result()
        while pending:
            origin, future = pending.popleft()
            yield from future.result()
    except BrokenProcessPool:
        if sys.version_info < (3, 11, 5):
            # A batch on its way to a worker is never taken, and the pool would wait for it (cpython issue 94777).
            pool._call_queue._reader.close()  # type: ignore[attr-defined]
        raise DataError(
            f"A tokenising process died at {origin} or soon after it, most often for lack of memory. "
            f"Start again with fewer --workers."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(records: Iterable[SourceRecord]) -> Iterator[list[SourceRecord]]:
    batch: list[SourceRecord] = []
    num_bytes = 0
    for record in records:
        batch.append(record)
        num_bytes += record.file.size_bytes if record.payload is None else len(record.payload)
        if num_bytes >= _MAX_BATCH_BYTES or len(batch) == _MAX_BATCH_RECORDS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _tokenize_batch(batch: list[SourceRecord], how: Tokenizing) -> list[TokenizedRecord]:
    if how.pair is not None:
        return _tokenize_pairs(batch, how, how.pair)
    if how.conversations is not None:
        return _tokenize_conversations(batch, how, how.conversations)
    texts: list[list[str]] = []
    reasons: list[str | None] = []
    for record in batch:
        try:
            text, reason = decode(record, how.field_name), None
        except BadDocument as error:
            text, reason = "", str(error)
        parts = cut(text, how.cut_documents) if how.cut_documents else [text]
        # Blanks alone are no document: it would teach when one ends.
        texts.append([] if text.isspace() else [part for part in parts if part])
        reasons.append(reason)
    eod = np.array([how.tokenizer.eod], dtype=how.tokenizer.token_dtype)
    ids = iter(how.tokenizer.tokenize_batch([part for parts in texts for part in parts]))
    return [
        _result(
            record,
            [Document(np.concatenate([next(ids), eod]), len(part.encode("utf-8"))) for part in parts],
            reason,
            how.tokenizer,
        )
        for record, parts, reason in zip(batch, texts, reasons, strict=True)
    ]


def _result(
    record: SourceRecord, documents: list[Document], reason: str | None, tokenizer: Tokenizer
) -> TokenizedRecord:
    """Result of a record. A text that ends in its middle is bad: there are as many ends as documents."""
    if any((document.ids[:-1] == tokenizer.eod).any() for document in documents):
        documents = []
        remedy = ", or leave --special-tokens out" if tokenizer.special_tokens and tokenizer.chat is None else ""
        reason = (
            f"its text becomes the token {tokenizer.eod_token}, which ends documents: name another end with --eod-token"
            f"{remedy}"
        )
    return TokenizedRecord(record.origin, record.file.input_index, record.file_bytes, tuple(documents), reason)


def _tokenize_pairs(batch: list[SourceRecord], how: Tokenizing, names: PairFields) -> list[TokenizedRecord]:
    """Each prompt, its answer and the end of the document, tokenised apart: no token is of both. Without an answer there
    is nothing to learn, and the record counts as empty."""
    pairs: list[tuple[str, str]] = []
    reasons: list[str | None] = []
    for record in batch:
        try:
            pair, reason = decode_pair(record, names), None
        except BadDocument as error:
            pair, reason = ("", ""), str(error)
        pairs.append(pair)
        reasons.append(reason)
    eod = np.array([how.tokenizer.eod], dtype=how.tokenizer.token_dtype)
    ids = iter(how.tokenizer.tokenize_batch([text for pair in pairs for text in pair]))
    records = []
    for record, (prompt, answer), reason in zip(batch, pairs, reasons, strict=True):
        of_prompt, of_answer = next(ids), next(ids)
        prompt_bytes, joined = len(prompt.encode("utf-8")), np.concatenate([of_prompt, of_answer, eod])
        scored = np.arange(len(joined)) >= len(of_prompt)
        document = Document(joined, prompt_bytes + len(answer.encode("utf-8")), scored, prompt_bytes)
        records.append(_result(record, [document] if answer else [], reason, how.tokenizer))
    return records


def _tokenize_conversations(
    batch: list[SourceRecord], how: Tokenizing, reader: ConversationReader
) -> list[TokenizedRecord]:
    """Each conversation as one text, by the template. Where the assistant says nothing there is nothing to learn."""
    marked: list[MarkedText | None] = []
    reasons: list[str | None] = []
    for record in batch:
        try:
            text, reason = reader.marked(decode_messages(record, reader.field.name)), None
        except BadDocument as error:
            text, reason = None, str(error)
        marked.append(text)
        reasons.append(reason)
    documents = iter(reader.documents([text for text in marked if text is not None]))
    records = []
    for record, text, reason in zip(batch, marked, reasons, strict=True):
        made = [] if text is None else [next(documents)]
        records.append(_result(record, made, reason, how.tokenizer))
    return records


_job: Tokenizing
"""Settings of this worker, sent to it once: a tokenizer is larger than many a batch."""


def _start_worker(how: Tokenizing, parent_pid: int) -> None:
    global _job
    # A pool's workers outlive a parent that is killed: each holds the queue open on which it waits.
    signal_on_parent_death(signal.SIGKILL, parent_pid)
    # Ctrl-C reaches the whole terminal; the parent answers it, and shuts the pool down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One process per core already: threads inside each would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = how


def _tokenize_in_worker(batch: list[SourceRecord]) -> list[TokenizedRecord]:
    return _tokenize_batch(batch, _job)
