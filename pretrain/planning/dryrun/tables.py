"""Rows of tables in files, in a dry run: without fetches and a thread. A step has as many as it can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from pretrain.engine.tables.step_reads import StepReads
from pretrain.engine.tables.stored_tables import Reads, Staged, StoredTable, StoredTables
from pretrain.planning.dryrun.no_files import NoFiles

T = TypeVar("T")
NO_SAMPLES: Any = ()
"""A data set that nobody reads."""


class DryTables(StoredTables):
    """See `StoredTables`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._files, self._thread = NoFiles(), _AtOnce()  # type: ignore[assignment]

    def has_all(self, held: Staged, wanted: Tensor, places: Tensor) -> bool:
        """See `StoredTables.has_all`."""
        return True

    def read(self, table: StoredTable, rows: Tensor) -> Staged:
        """See `StoredTables.read`."""
        return self._room_for(table, rows.numel())

    def _own_ids(self, reads: Reads, samples: range) -> Tensor:
        return reads.own_ids(samples)

    def _rows_for(self, reads: Reads, samples: range, *, updates: bool) -> list[Staged]:
        if self._ahead is not None:
            return super()._rows_for(reads, samples, updates=updates)
        # As in the middle of a run: the step before has exchanged the ids.
        own = reads.own_ids(samples)
        return self._fetch_step(reads, own.new_empty(2, len(samples), own.shape[2]), None)

    def _fetch_step(
        self,
        reads: Reads,
        ids: Tensor,
        beside: Sequence[Staged] | None,
        waiting: Sequence[Sequence[Tensor]] | None = None,
    ) -> list[Staged]:
        found = reads.rows(ids)
        num_waiting = [sum(len(rows) for rows in of_table) for of_table in waiting or [()] * len(self._tables)]
        staged = [
            self._room_for(table, found[table.bank].numel() + num) for table, num in zip(self, num_waiting, strict=True)
        ]
        for own, before in zip(staged, beside or (), strict=False):
            own.before = before
        return staged

    def _room_for(self, table: StoredTable, num_entries: int) -> Staged:
        """Room for as many rows of a table as so many entries can be of, and for their places in two steps."""
        num, width = min(num_entries, len(table.parameter)), table.parameter.shape[1]
        room = partial(torch.empty, num, device=self._device)
        weights = torch.empty(num, width, dtype=table.parameter.dtype, device=self._device)
        places = room(dtype=torch.int64), room(dtype=torch.int64)
        state = [room(dtype=tensor.dtype) for tensor in table.state]
        rows = room(dtype=torch.int64)
        return Staged(rows, rows, weights, state, places)

    def _on_host(self, staged: Staged) -> tuple[list[Tensor], None]:
        return [], None

    def _write(self, *arguments: Any) -> None:
        """Nothing: there are no files."""


class _AtOnce:
    """A thread whose work is done when it is asked for."""

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(work(*arguments))
        return done


@dataclass(frozen=True)
class DryReads(StepReads):
    """See `StepReads`: without a data set.

    Attributes:
        sequence_length: s.
    """

    sequence_length: int

    def own_ids(self, samples: range) -> Tensor:
        """See `StepReads.own_ids`; on the device."""
        share = -(-len(samples) // self.ranks.size())
        return torch.empty(2, share, self.sequence_length, dtype=torch.int32, device=self.groups.device)
