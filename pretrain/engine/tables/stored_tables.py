"""Tables that lie in files while they train (`optimizer.table_folder`).

Tokens say which rows a step reads (`pretrain.engine.tables.step_reads`). While a step runs, a thread finds the rows of the next one
and fetches them, weights and state; after the update it writes the step's own rows back. The thread does one thing after the other, so that a fetch sees
all writes but the one of the step that it runs beside: rows that both steps read go from one to the other on the device.
What a step computes with is to the bit what a table on the device would have given it. A step that updates tables for those before it
(`optimizer.tables_every`) has the rows of all of them.

Replicas have files of their own, and fetch the rows that any of them reads: each updates all of these, and so all files have the
same bits.

Outside of steps (evaluation, generation) rows are fetched as they are asked for.

Legend: n rows of a step, W columns on this rank, T tokens, J rows read per token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from kernels.common.side_thread import side_thread
from kernels.common.table_gradient import give_gradient
from kernels.common.table_scale import give_scale, scale_of
from megamem.model import MemoryGPTModel
from pretrain.config.updates import ROW_WISE
from pretrain.engine.tables.row_gradients import row_gradient_of
from pretrain.engine.tables.table_files import FileRecords, TableFiles

_ROWS_AT_A_TIME = 1 << 16
"""Rows of a file that are in memory at once where all of them change."""


class Reads(Protocol):
    """The way to the rows that a step reads: see `pretrain.engine.tables.step_reads.StepReads`."""

    def own_ids(self, samples: range) -> Tensor: ...
    def exchanged(self, own: Tensor) -> Tensor: ...
    def rows(self, ids: Tensor) -> Mapping[int, Tensor]: ...


@dataclass
class Waits:
    """Seconds since a step began to be timed: of the thread's fetches and write-backs, and of steps that waited for it."""

    fetching_s: float = 0.0
    writing_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(eq=False)
class Staged:
    """A table's rows of one step.

    Attributes:
        rows: [n] int64 in host memory, ascending.
        numbers: [n] int64, the rows on the device.
        weights: [n, W], of which a step makes a gradient if the table is trained.
        state: [n] fp32 each.
        shared: positions of rows that the step before reads too, here and in `before`.
        before: rows of the step before; None: no step ran beside the fetch.
        is_changed: the step has updated them.
    """

    rows: Tensor
    numbers: Tensor
    weights: Tensor
    state: Sequence[Tensor]
    shared: tuple[Tensor, Tensor] | None = None
    before: Staged | None = None
    is_changed: bool = False

    @torch.no_grad()
    def catch_up(self) -> None:
        """Take the rows that the step before has updated since they were fetched."""
        if self.before is not None and self.before.is_changed:
            assert self.shared is not None
            here, there = self.shared
            for own, updated in zip(
                (self.weights, *self.state), (self.before.weights, *self.before.state), strict=True
            ):
                own.index_copy_(0, here, updated[there])
        self.before = self.shared = None


class StoredTable:
    """A table in a file, as a bank reads it (`megamem.token_tables.fetched.RowFetch`).

    Attributes:
        parameter: the whole table, in the file.
        bank: its index.
        records: records of the file.
        staged: the rows of the step that runs; None: none does.
        waiting: [n] int64 in host memory each, rows of steps that the next update waits for.
    """

    def __init__(self, parameter: nn.Parameter, bank: int, records: FileRecords, owner: StoredTables) -> None:
        self.parameter, self.bank, self.records, self.owner = parameter, bank, records, owner
        self.staged: Staged | None = None
        self.waiting: tuple[Tensor, ...] = ()

    @property
    def state(self) -> Sequence[Tensor]:
        """[R] each, beside the rows."""
        return self.records.state

    def announce(self, token_ids: Tensor) -> None:
        """Nothing: a step's rows are here before it begins."""

    def table(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that are here [n, W], and the places of `rows` [T, J] among them."""
        held = self.staged or self.owner.read(self, rows)
        wanted = rows.to(torch.int64)
        places = torch.searchsorted(held.numbers, wanted, out_int32=True)
        # Gathers are given what is here.
        give_scale(held.weights, scale_of(self.parameter))
        assert self.owner.has_all(held, wanted, places), f"a step reads rows of bank {self.bank} that nobody foresaw"
        return held.weights, places

    def open(self, staged: Staged) -> None:
        """Have a step read these rows."""
        self.staged = staged
        if self.parameter.requires_grad:
            before = row_gradient_of(self.parameter)
            assert before is not None
            gradient = before.of_rows(staged.numbers)
            for table in (self.parameter, staged.weights.requires_grad_()):
                give_gradient(table, gradient)

    def close(self) -> None:
        """End the step, and keep its rows' numbers while its lookups wait for an update."""
        staged, self.staged = self.staged, None
        gradient = row_gradient_of(self.parameter)
        if gradient is None or not gradient.waiting:
            self.waiting = ()
        elif staged is not None and gradient.waiting[-1].numbers is staged.numbers:
            self.waiting += (staged.rows,)


@dataclass(frozen=True)
class _Ahead:
    """A fetch for the next step.

    Attributes:
        samples: samples of that step.
        updates: the fetch has the rows of steps that wait for an update, too.
    """

    samples: range
    updates: bool
    staged: Future[list[Staged]]


@dataclass(frozen=True)
class _Room:
    """See `megamem.banks.bank.TableRoom`."""

    records: FileRecords
    owner: StoredTables

    @property
    def weights(self) -> Tensor:
        """See `megamem.banks.bank.TableRoom`."""
        return self.records.weights

    def reader(self, table: nn.Parameter, bank: int) -> StoredTable:
        """See `megamem.banks.bank.TableRoom`."""
        return self.owner.add(StoredTable(table, bank, self.records, self.owner))


class StoredTables:
    """All tables of a rank that lie in files, and the thread that brings their rows."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """
        Args:
            folder: folder on a local disk (`TableFiles`).
            device: device on which the model computes.
        """
        self._files, self._device = TableFiles(folder), device
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)
        self._tables: dict[nn.Parameter, StoredTable] = {}
        self._thread = side_thread("tables", device)
        self._ids: tuple[range, Future[Tensor]] | None = None
        self._ahead: _Ahead | None = None
        self.waits = Waits()
        self._writes: list[Future[None]] = []

    def room(self, shape: tuple[int, int], dtype: torch.dtype) -> _Room:
        """See `megamem.banks.bank.TableHome`."""
        return _Room(self._files.records(*shape, dtype, len(ROW_WISE.per_row)), self)

    def add(self, table: StoredTable) -> StoredTable:
        """Bring the rows of this table, too."""
        self._tables[table.parameter] = table
        return table

    def __iter__(self) -> Iterator[StoredTable]:
        """All tables, in the order in which they were made."""
        return iter(self._tables.values())

    def __contains__(self, table: nn.Parameter) -> bool:
        """Tell whether this table lies in a file."""
        return table in self._tables

    def of(self, table: nn.Parameter) -> StoredTable:
        """The table that is this parameter."""
        return self._tables[table]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of this rank."""
        return self._files.num_bytes

    @contextmanager
    def step(
        self, reads: Reads, samples: range, following: Sequence[range], updates: tuple[bool, bool] = (True, True)
    ) -> Iterator[None]:
        """Have the rows of a step's samples on the device within the block, and write those back that it updates.
        Collective over the stage.

        Args:
            samples: numbers of the step's samples, over all ranks.
            following: samples of the next two steps, as far as there are any. Should the next one be another one, its
                rows are fetched when it begins.
            updates: flags: this step updates the tables; the next one does, if this one is not skipped.
        """
        staged = self._rows_for(reads, samples, updates=updates[0])
        if following:
            ids = self._exchanged(reads, following[0])
            waiting = None
            if updates == (False, True):
                waiting = [(*table.waiting, own.rows) for table, own in zip(self, staged, strict=True)]
            fetch = self._thread.submit(self._fetch_step, reads, ids, staged, waiting)
            self._ahead = _Ahead(following[0], updates[1], fetch)
        if following[1:]:
            self._ids = following[1], self._thread.submit(self._own_ids, reads, following[1])
        for table, rows in zip(self, staged, strict=True):
            table.open(rows)
        try:
            yield
        finally:
            for table in self:
                table.close()
        self._writes += [
            self._thread.submit(self._write, table, rows, *self._on_host(rows))
            for table, rows in zip(self, staged, strict=True)
            if rows.is_changed
        ]

    def settle(self) -> None:
        """Wait until the files have all updates: before whole tables are read or written."""
        for write in self._writes:
            # Errors of the thread are raised here.
            write.result()
        self._writes.clear()
        self._files.expect_all()

    def forget(self) -> None:
        """Fetch anew what was fetched ahead: the tables have been loaded, or changed as a whole."""
        self._ids = None
        if self._ahead is not None:
            self._ahead.staged.result()
            self._ahead = None

    @torch.no_grad()
    def multiply(self, parameter: nn.Parameter, factor: float) -> None:
        """Multiply all rows of a table by a factor, in its file and of the step that runs."""
        self.settle()
        self.forget()
        for rows in parameter.detach().split(_ROWS_AT_A_TIME):
            rows.mul_(factor)
        staged = self._tables[parameter].staged
        assert staged is not None
        staged.weights.mul_(factor)
        staged.is_changed = True

    def has_all(self, held: Staged, wanted: Tensor, places: Tensor) -> bool:
        """Tell whether rows are at their places; true without a look on a GPU, which the host would wait for."""
        return wanted.device.type != "cpu" or torch.equal(held.numbers[places], wanted)

    def read(self, table: StoredTable, rows: Tensor) -> Staged:
        """Rows of a table, each once and ascending, as the last step left them."""
        wanted = self._there(rows.unique().to(torch.int64))
        return self._here(self._thread.submit(self._fetch, table, wanted, None).result())

    def _exchanged(self, reads: Reads, samples: range) -> Tensor:
        """Ids of all ranks' tokens of a step."""
        ids, self._ids = self._ids, None
        if ids is None or ids[0] != samples:
            own = self._thread.submit(self._own_ids, reads, samples).result()
        else:
            own = ids[1].result()
        if self._stream is not None:
            own.record_stream(torch.cuda.current_stream(self._device))
        return self._there(reads.exchanged(own))

    def _own_ids(self, reads: Reads, samples: range) -> Tensor:
        """Ids of this rank's share of a step's tokens on the device, in a thread."""
        return self._to_device(reads.own_ids(samples))

    def _rows_for(self, reads: Reads, samples: range, *, updates: bool) -> list[Staged]:
        ahead, self._ahead = self._ahead, None
        started = time.perf_counter()
        # The step before was skipped, if one updates tables against expectation.
        if ahead is None or ahead.samples != samples or updates > ahead.updates:
            waiting = [table.waiting for table in self] if updates else None
            ids = self._exchanged(reads, samples)
            staged = self._thread.submit(self._fetch_step, reads, ids, None, waiting).result()
        else:
            staged = ahead.staged.result()
        self.waits.waiting_s += time.perf_counter() - started
        while self._writes and self._writes[0].done():
            self._writes.pop(0).result()
        for rows in staged:
            self._here(rows).catch_up()
        return staged

    def _there(self, ids: Tensor) -> Tensor:
        """Ids, used from now on by the thread's stream, behind what makes them."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            ids.record_stream(self._stream)
        return ids

    def _here(self, staged: Staged) -> Staged:
        """Rows of a step, used from now on by the stream that computes."""
        if self._stream is not None:
            for tensor in (staged.numbers, staged.weights, *staged.state, *(staged.shared or ())):
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return staged

    @torch.no_grad()
    def _fetch_step(
        self,
        reads: Reads,
        ids: Tensor,
        beside: Sequence[Staged] | None,
        waiting: Sequence[Sequence[Tensor]] | None = None,
    ) -> list[Staged]:
        """Rows of all tables for a step, in a thread.

        Args:
            ids: token ids and places of the step (`Reads.exchanged`).
            beside: rows of the step that may update some of them meanwhile.
            waiting: `StoredTable.waiting` of each table, whose rows are fetched, too.
        """
        started = time.perf_counter()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            found = reads.rows(ids)
            distinct = [found[table.bank].unique().to(torch.int64) for table in self]
        fetched = [
            self._fetch(
                table, rows, None if beside is None else beside[place], () if waiting is None else waiting[place]
            )
            for place, (table, rows) in enumerate(zip(self, distinct, strict=True))
        ]
        self.waits.fetching_s += time.perf_counter() - started
        return fetched

    @torch.no_grad()
    def _fetch(self, table: StoredTable, rows: Tensor, beside: Staged | None, waiting: Sequence[Tensor] = ()) -> Staged:
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                rows = rows.cpu()
        if waiting:
            rows = torch.cat((rows, *waiting)).unique()
        # A table is never without rows: kernels are asked for those of no token, too.
        rows = rows if rows.numel() else torch.zeros(1, dtype=torch.int64)
        self._files.bring(table.records, rows)
        held = [self._to_device(tensor.index_select(0, rows)) for tensor in (table.parameter.detach(), *table.state)]
        staged = Staged(rows, self._to_device(rows), held[0], held[1:], before=beside)
        if beside is not None:
            places = torch.searchsorted(beside.rows, rows).clamp_(max=len(beside.rows) - 1)
            here = (beside.rows[places] == rows).nonzero().squeeze(1)
            staged.shared = self._to_device(here), self._to_device(places[here])
        return staged

    @torch.no_grad()
    def _write(
        self, table: StoredTable, staged: Staged, updated: Sequence[Tensor], copied: torch.cuda.Event | None
    ) -> None:
        """Write a step's rows back, in a thread."""
        if copied is not None:
            copied.synchronize()
        started = time.perf_counter()
        # The system may have dropped them meanwhile.
        self._files.bring(table.records, staged.rows)
        for whole, rows in zip((table.parameter.detach(), *table.state), updated, strict=True):
            whole.index_copy_(0, staged.rows, rows)
        self.waits.writing_s += time.perf_counter() - started

    def _to_device(self, tensor: Tensor) -> Tensor:
        """In a thread, on its own stream, which is waited for: a step finds what is fetched there."""
        if self._stream is None:
            return tensor
        with torch.cuda.stream(self._stream):
            moved = tensor.pin_memory().to(self._device, non_blocking=True)
        self._stream.synchronize()
        return moved

    def _on_host(self, staged: Staged) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """A step's rows as it leaves them, on their way to host memory, and the event of their arrival."""
        held = [staged.weights.detach(), *staged.state]
        if self._stream is None:
            return held, None
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in held]
        for copy, tensor in zip(copies, held, strict=True):
            copy.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return copies, copied


def stored_tables_of(chunks: Iterable[MemoryGPTModel]) -> StoredTables | None:
    """The tables of a rank's bare chunks that lie in files; None if they do not."""
    for chunk in chunks:
        for bank in chunk.own_banks:
            if isinstance(bank.fetched, StoredTable):
                return bank.fetched.owner
    return None
