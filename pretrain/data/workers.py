"""Tokenising records in other processes, in source order, whatever their number.

Workers hold one pipe each and are served in turn: batch i goes to worker i modulo their number, and results are read in the same order,
so no result depends on how many there are. A worker that dies is noticed at once (its pipe closes), and so is a parent that dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.data.sources import BadDocument, Record, decode
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError

_MAX_BATCH_BYTES = 1 << 20
_MAX_BATCH_RECORDS = 256


@dataclass(frozen=True)
class TokenizedRecord:
    """What became of a record: ids ended by the end-of-document id, nothing (an empty document), or a reason why it is bad."""

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
        records: undecoded documents.
        tokenizer: makes the ids.
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
    with _start_workers(tokenizer, field_name, num_workers) as workers:
        idle, busy = deque(workers), deque[_Worker]()
        for batch in batches:
            if not idle:
                worker = busy.popleft()
                results = worker.receive()
                idle.append(worker)
            else:
                results = []
            worker = idle.popleft()
            worker.send(batch)
            busy.append(worker)
            yield from results
        while busy:
            yield from busy.popleft().receive()


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
    results = []
    for record, text, reason, ids in zip(batch, texts, reasons, tokenizer.tokenize_batch(texts), strict=True):
        results.append(
            TokenizedRecord(
                record.origin,
                record.file.input_index,
                record.file_bytes,
                ids=np.concatenate([ids, eod]) if text else None,
                text_bytes=len(text.encode("utf-8")),
                bad_reason=reason,
            )
        )
    return results


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    connection: Connection

    def send(self, batch: list[Record]) -> None:
        try:
            self.connection.send(batch)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def receive(self) -> list[TokenizedRecord]:
        try:
            results = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        if isinstance(results, str):
            raise RuntimeError(f"A tokenising process failed:\n{results}")
        return results

    def _died(self) -> DataError:
        self.process.join(timeout=5)
        return DataError(
            f"A tokenising process died (exit code {self.process.exitcode}; -9 is most often a lack of memory). "
            f"Start again with fewer --workers."
        )


@contextmanager
def _start_workers(tokenizer: Tokenizer, field_name: str, num_workers: int) -> Iterator[list[_Worker]]:
    # Spawned, not forked: the parent may have threads by now (torch, pyarrow, the tokenizers package), and a forked lock never opens.
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        workers = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker_main, args=(theirs, tokenizer, field_name), daemon=True)
            process.start()
            # The child must hold the only other end, or its death would not close the pipe.
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            stack.callback(ours.close)
            workers.append(_Worker(process, ours))
        yield workers


def _worker_main(connection: Connection, tokenizer: Tokenizer, field_name: str) -> None:
    # One process per core already: threads inside each would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches the whole terminal; the parent answers it, and its end closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with connection:
        while True:
            try:
                batch = connection.recv()
            except (EOFError, ConnectionResetError):
                return
            try:
                reply: list[TokenizedRecord] | str = _tokenize_batch(batch, tokenizer, field_name)
            except Exception:
                reply = traceback.format_exc()
            try:
                connection.send(reply)
            except (BrokenPipeError, ConnectionResetError):
                return
