"""State of a checkpoint beside a patch: applied, not applied, or neither, as rows hold something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from pretrain.convert.format import OpenedCheckpoint
from pretrain.convert.resources import OnStart, Resources
from pretrain.errors import CheckpointError
from pretrain.patch.file import Patch, Side, slices
from pretrain.patch.identity import difference_of_model, tables_of
from pretrain.patch.places import TablePlaces

OTHER: Mapping[Side, Side] = {"before": "after", "after": "before"}
"""The other side of a patch."""


@dataclass(frozen=True)
class RowsElsewhere:
    """Rows of a stored table that are not as a patch has them on one side.

    Attributes:
        table: name of the table.
        num_rows: rows in the patch.
        num_others: rows of these that are stored otherwise.
        first: number of the first of them in the table; None: there is none.
        is_rounded: the patch has fewer bits of a row than the checkpoint.
    """

    table: str
    num_rows: int
    num_others: int
    first: int | None
    is_rounded: bool

    @property
    def text(self) -> str:
        """Words for people."""
        return f"{self.num_others:,} of {self.num_rows:,} rows of {self.table} hold something else (the first is row {self.first:,})"


@dataclass(frozen=True)
class PatchState:
    """A checkpoint beside a patch of its model.

    Attributes:
        others: rows that are not as the patch has them, per stored table that has some, by side of the patch.
    """

    others: Mapping[Side, Sequence[RowsElsewhere]]

    def is_at(self, side: Side) -> bool:
        """Tell whether all rows are as the patch has them on one side."""
        return not self.others[side]

    @property
    def nearest(self) -> Side:
        """Side of the patch that most rows are as on."""
        return min(self.others, key=lambda side: sum(each.num_others for each in self.others[side]))

    def why_not(self, side: Side) -> str:
        """Words for people why the rows are not those of a side."""
        return ", ".join(each.text for each in self.others[side])


def other_model(patch: Patch, opened: OpenedCheckpoint, resources: Resources, on_start: OnStart) -> str | None:
    """Difference between a checkpoint's model and the one that a patch was made on, in words; None if there is none."""
    shapes = tables_of(opened)
    for table, shape in patch.about.shapes.items():
        if shapes.get(table) != shape:
            there = f"has the shape {shapes[table]}" if table in shapes else "is not"
            return f"{table} {there} in {opened.path}, and has the shape {shape} in that model"
    return difference_of_model(patch.about.identity, opened, resources, on_start)


def state_of(
    patch: Patch, stored: Mapping[str, tuple[TablePlaces, ...]], resources: Resources, on_start: OnStart
) -> PatchState:
    """Compare all rows of a patch with those in a checkpoint's files.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    others: dict[Side, list[RowsElsewhere]] = {side: [] for side in get_args(Side)}
    every = [(table, each) for table in patch.tables for each in stored[table]]
    tell = on_start("rows", sum(patch.num_rows(table) * each.codec.record_bytes for table, each in every))
    for table, each in every:
        ids = patch.row_ids(table)
        equal = _equal_rows(patch, table, each, ids, resources)
        tell(len(ids) * each.codec.record_bytes)
        for side, flags in equal.items():
            odd = np.flatnonzero(~flags)
            if len(odd):
                is_rounded = patch.dtype(side, table).itemsize < each.codec.dtype.itemsize
                others[side].append(RowsElsewhere(each.name, len(ids), len(odd), int(ids[odd[0]]), is_rounded))
    return PatchState(others)


def rows_at_once(patch: Patch, table: str, resources: Resources) -> int:
    """Rows of a table to hold at a time."""
    width = max(1, patch.about.shapes[table][1])
    # Codes are made of elements of eight bytes.
    return max(1, resources.piece_bytes // (8 * width))


def _equal_rows(
    patch: Patch, table: str, stored: TablePlaces, ids: np.ndarray, resources: Resources
) -> dict[Side, np.ndarray]:
    """Flags of the rows in the files that are as a patch has them, by side."""
    equal: dict[Side, np.ndarray] = {side: np.ones(len(ids), bool) for side in get_args(Side)}
    num_bytes = 0
    for part, start, stop in stored.within(ids):
        for first, last in slices(stop - start, rows_at_once(patch, table, resources)):
            chosen = slice(start + first, start + last)
            there = part.read(ids[chosen])
            num_bytes += there.size
            for side, flags in equal.items():
                records = stored.records(patch.read(side, table, chosen.start, chosen.stop))
                flags[chosen] &= (there == part.cut(records)).all(1)
    if num_bytes != len(ids) * stored.codec.record_bytes:
        raise CheckpointError(f"{stored.name} is damaged: some of its elements are missing. Use another checkpoint")
    return equal
