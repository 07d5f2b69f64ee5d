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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel.parent_death import signal_on_parent_death
from pretrain.data.sources import BadDocument, Record, decode
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError

_MAX_BATCH_BYTES = 1 << 20
_MAX_BATCH_RECORDS = 256


@dataclass(frozen=True)
class TokenizedRecord:
    """What became of a record: ids with the end-of-document id, nothing (an empty document), or why it is bad."""

    origin: str
    input_index: int
    file_bytes: int
    ids: NDArray[Any] | None = None
    text_bytes: int = 0
    bad_reason: str | None = None


def tokenize_records(
    records: Iterable[Record], tokenizer: Tokenizer, field_name: str, num_workers: int
) -> Iterator[TokenizedRecord]:
    """Decode and tokenise records, in order.

    Args:
        field_name: JSON field that holds the text.
        num_workers: processes; 1 works in this one.

    Raises:
        DataError: a worker was killed.
    """
    batches = _batches(records)
    if num_workers == 1:
        for batch in batches:
            yield from _tokenize_batch(batch, tokenizer, field_name)
        return
    # Spawned, not forked: the parent may have threads by now (torch, pyarrow, the tokenizers package), and a forked
    # lock never opens.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (tokenizer, field_name, os.getpid()))
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


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    num_bytes = 0
    for record in records:
        batch.append(record)
        num_bytes += record.file.size_bytes if record.payload is None else len(record.payload)
        if num_bytes >= _MAX_BATCH_BYTES or len(batch) == _MAX_BATCH_RECORDS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _tokenize_batch(batch: list[Record], tokenizer: Tokenizer, field_name: str) -> list[TokenizedRecord]:
    texts: list[str] = []
    reasons: list[str | None] = []
    for record in batch:
        try:
            texts.append(decode(record, field_name))
            reasons.append(None)
        except BadDocument as error:
            texts.append("")
            reasons.append(str(error))
    eod = np.array([tokenizer.eod], dtype=tokenizer.token_dtype)
    return [
        TokenizedRecord(
            record.origin,
            record.file.input_index,
            record.file_bytes,
            ids=np.concatenate([ids, eod]) if text else None,
            text_bytes=len(text.encode("utf-8")),
            bad_reason=reason,
        )
        for record, text, reason, ids in zip(batch, texts, reasons, tokenizer.tokenize_batch(texts), strict=True)
    ]


_job: tuple[Tokenizer, str]
"""What `_start_worker` was given: sent once per worker, for a tokenizer is larger than many a batch."""


def _start_worker(tokenizer: Tokenizer, field_name: str, parent_pid: int) -> None:
    global _job
    # A pool's workers outlive a parent that is killed: each holds the queue open on which it waits.
    signal_on_parent_death(signal.SIGKILL, parent_pid)
    # Ctrl-C reaches the whole terminal; the parent answers it, and shuts the pool down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One process per core already: threads inside each would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = tokenizer, field_name


def _tokenize_in_worker(batch: list[Record]) -> list[TokenizedRecord]:
    return _tokenize_batch(batch, *_job)
