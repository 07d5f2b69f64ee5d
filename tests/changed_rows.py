"""Checkpoints some of whose tables' rows are others, as training of these rows alone leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pretrain.checkpoint.derived import main_name
from pretrain.checkpoint.store.tensors import Region, TensorInfo, TensorReader
from pretrain.convert.registry import open_checkpoint
from pretrain.convert.resources import Resources
from pretrain.patch.make import make_patch


class ChangedRows:
    """A reader some of whose rows are others: row r moved by `by` (1 + r) (column - 3.5)."""

    def __init__(self, source: TensorReader, rows: Mapping[str, tuple[int, ...]], by: float) -> None:
        self._source, self._by = source, by
        self._rows = {name: rows[table] for table in rows for name in (table, main_name(table))}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._source.tensors

    def read(self, region: Region) -> Tensor:
        tensor = self._source.read(region)
        for row in self._rows.get(region.name, ()):
            place = row - region.offset[0]
            if 0 <= place < region.shape[0]:
                columns = torch.arange(region.offset[1], region.offset[1] + region.shape[1])
                tensor[place] += self._by * (1 + row) * (columns - 3.5)
        return tensor


def write_some_patch(run: Path, path: Path, rows: Mapping[str, tuple[int, ...]], by: float = 0.01) -> Path:
    """A patch of a run's newest checkpoint, without one to take it from."""
    before = open_checkpoint(run)
    after = replace(before, reader=ChangedRows(before.reader, rows, by))
    make_patch(
        before,
        after,
        path,
        max_bytes=1 << 20,
        resources=Resources(1, 2 << 30),
        on_start=lambda *_: lambda _: None,
    )
    return path
