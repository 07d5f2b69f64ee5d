"""Gradients of tables that hold the rows which a step read, and not the table.

A step's lookups are kept until its last backward pass, and then added up: each distinct row that was read has one row of
sums. That takes the memory of what was read, and a row's sum has the bits that it has in a dense gradient: the same
additions, in the order of the lookups. Where tables are updated every few steps, lookups of the steps before are kept, too,
and added up with those of the last one.

Legend: M entries of all lookups, N rows of sums, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.common.joined_lookups import Lookup, in_groups


@dataclass(frozen=True)
class DistinctRows:
    """Rows that lookups read, each once.

    Attributes:
        rows: [N] int64, ascending. On a GPU N is the most that there could be, and rows behind the last repeat the first.
        sources: [N] int64, the row of the sums that belongs to each of `rows`; None: its own.
        counts: [N] int64, reads of each row of the sums, 0 where it has none; None: nobody asked for them.
    """

    rows: Tensor
    sources: Tensor | None
    counts: Tensor | None = None


@dataclass(frozen=True)
class WaitingStep:
    """Lookups of a step that an update waits for.

    Attributes:
        lookups: with ids as of `numbers`.
        numbers: `RowGradient.numbers` in that step.
    """

    lookups: tuple[Lookup, ...]
    numbers: Tensor | None


class RowGradient:
    """A table's gradient of one step, or of those since the last update.

    Attributes:
        num_rows: rows of the table.
        is_due: the step adds up what there is, and updates the table; else its lookups wait for a later step.
        repeats: lookups of a microbatch, all of which read the same rows.
        read: rows, once `add_up` has added them up.
        sums: [N, W] fp32, likewise.
        choose: tells which of the rows that all replicas have read are trained, [N] bool; None: all are.
        numbers: [num_rows] int64, the rows' numbers among this rank's rows of the table, ascending; None: they are all of
            these.
        waiting: steps since the last update whose lookups wait for the next one.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        """
        Args:
            num_rows, width: sizes of the table.
        """
        self.num_rows, self._width = num_rows, width
        self.repeats = 1
        self.is_due = True
        self._lookups: list[Lookup] = []
        self._num_tokens: Tensor | None = None
        self._num_waiting_tokens: Tensor | None = None
        self.read: DistinctRows | None = None
        self.sums: Tensor | None = None
        self.choose: Callable[[RowGradient], Tensor] | None = None
        self.numbers: Tensor | None = None
        self.waiting: tuple[WaitingStep, ...] = ()

    def of_rows(self, numbers: Tensor) -> RowGradient:
        """The next step's gradient, of the table's rows of these numbers, [n] int64 and ascending, with what waits in this
        one: in a step that updates the table, rows of the steps that wait are among them."""
        found = RowGradient(len(numbers), self._width)
        found.repeats, found.choose, found.numbers = self.repeats, self.choose, numbers
        found.waiting, found._num_waiting_tokens = self.waiting, self._num_waiting_tokens
        return found

    def add(self, lookup: Lookup) -> None:
        """Keep a lookup's part of the gradient."""
        self._lookups.append(lookup)

    def begin_step(self, *, is_due: bool) -> None:
        """Forget the step before but for what waits of it: lookups of an update that was not applied are lost."""
        self._lookups.clear()
        self.read = self.sums = self._num_tokens = None
        self.is_due = is_due

    def count(self, num_tokens: Tensor) -> None:
        """Keep the number, [] int64, of the tokens that the step's gradients are summed over, of all ranks."""
        self._num_tokens = num_tokens

    @property
    def num_tokens(self) -> Tensor | None:
        """Tokens since the last update; None: nobody counted."""
        if self._num_tokens is None or self._num_waiting_tokens is None:
            return self._num_tokens
        return self._num_tokens + self._num_waiting_tokens

    def wait(self) -> None:
        """Have the step's lookups wait for the one that updates the table."""
        if self._lookups:
            self.waiting += (WaitingStep(tuple(self._lookups), self.numbers),)
        self._num_waiting_tokens = self.num_tokens
        self._lookups.clear()

    def clear(self) -> None:
        """Forget lookups and sums, those that wait, too."""
        self.begin_step(is_due=self.is_due)
        self.waiting = ()
        self._num_waiting_tokens = None

    def _all_lookups(self) -> list[Lookup]:
        """Lookups since the last update, with ids as of `numbers`."""
        self.waiting = tuple(self._renumbered(step) for step in self.waiting)
        return [*(lookup for step in self.waiting for lookup in step.lookups), *self._lookups]

    def _renumbered(self, step: WaitingStep) -> WaitingStep:
        if self.numbers is None or step.numbers is None or step.numbers is self.numbers:
            return step
        places = torch.searchsorted(self.numbers, step.numbers, out_int32=True)
        lookups = (
            replace(lookup, ids=places.index_select(0, lookup.ids.flatten()).view(lookup.ids.shape))
            for lookup in step.lookups
        )
        return WaitingStep(tuple(lookups), self.numbers)

    def _add_up(self, lookups: Iterable[Lookup], read: DistinctRows, slots: Sequence[Tensor]) -> None:
        self.read = read
        self.sums = torch.zeros(read.rows.numel(), self._width, dtype=torch.float32, device=read.rows.device)
        if read.rows.numel():
            numbered = (replace(lookup, ids=own) for lookup, own in zip(lookups, slots, strict=True))
            for lookup in in_groups(numbered, self._width):
                lookup.add_to(self.sums)
        # What waits does so until the update is applied.
        self._lookups.clear()

    @staticmethod
    def add_up(gradients: Iterable[RowGradient]) -> None:
        """Add up what lookups have left. Rows are looked for once for tables that the same lookups read."""
        read = [(gradient, lookups) for gradient in gradients if (lookups := gradient._all_lookups())]
        # Tables that the same lookups read have a key in common. All keys are made before any lookup is dropped, and another
        # tensor may get its ids' number.
        keys = [(gradient.num_rows, *(id(lookup.ids) for lookup in lookups)) for gradient, lookups in read]
        known: dict[tuple[int, ...], tuple[DistinctRows, tuple[Tensor, ...]]] = {}
        for number, key in enumerate(keys, 1):
            gradient, lookups = read.pop(0)
            if key not in known:
                ids = [lookup.ids for lookup in lookups]
                known[key] = distinct_rows(
                    ids, gradient.num_rows, repeats=gradient.repeats, counted=gradient.choose is not None
                )
            gradient._add_up(lookups, *known[key])
            if key not in keys[number:]:
                # Slots, and the order that is kept on them, take more than ids do.
                del known[key]


def distinct_rows(
    lookups: Sequence[Tensor], num_rows: int, *, repeats: int = 1, counted: bool = False
) -> tuple[DistinctRows, tuple[Tensor, ...]]:
    """Rows that lookups read, by a sort of all entries. No shape depends on data on a GPU, so that nothing waits for it.

    Args:
        lookups: ids of each, at least one, of any shape. A number outside [0, num_rows) is of a row that others hold.
        num_rows: rows of the table.
        repeats: times that every row is there; a read counts once for all of them.
        counted: count reads.

    Returns:
        The rows, and rows of the sums for each lookup, int32 in the shape of its ids; -1 for rows that others hold.
    """
    ids = torch.cat([ids.reshape(-1) for ids in lookups])
    most, device = min(ids.numel() // repeats, num_rows), ids.device
    # Rows of others come behind all own ones. In place: while so many ids are sorted, each byte per id counts.
    ids.masked_fill_((ids < 0) | (ids > num_rows), num_rows)
    ordered, order = ids.sort()
    begins = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=begins[1:])
    places = begins.cumsum(0).sub_(1)
    rows = torch.full((most + 1,), num_rows, dtype=torch.int64, device=device)
    rows = rows.scatter_(0, places, ordered.to(torch.int64))[:most]
    places = torch.where(ordered == num_rows, -1, places).to(torch.int32)
    counts = None
    if counted:
        counts = torch.zeros(most + 1, dtype=torch.int64, device=device)
        # Entries without a row of their own count behind the last.
        counts.scatter_add_(
            0, torch.where(places < 0, most, places).long(), torch.ones_like(ordered, dtype=torch.int64)
        )
        counts = counts[:most] // repeats
    slots = torch.empty_like(places).scatter_(0, order, places)
    parts = slots.split([ids.numel() for ids in lookups])
    by_lookup = tuple(part.view(ids.shape) for part, ids in zip(parts, lookups, strict=True))
    if device.type == "cpu" and type(rows) is torch.Tensor:
        # Host sync: none on a CPU, where rows that were not read need no sums. (A dry run's tensors have no values.)
        num = int((rows < num_rows).sum())
        return DistinctRows(rows[:num].clone(), None, None if counts is None else counts[:num]), by_lookup
    sources = torch.where(rows < num_rows, torch.arange(most, device=device), 0)
    # Without a row of its own a rank repeats its first, whose sum is then zero.
    return DistinctRows(rows[sources].clamp_(max=num_rows - 1), sources, counts), by_lookup
