"""Places of table rows in a checkpoint's files: read there, and overwritten in copies of the files.

Legend: n rows at once, W columns of a table, B bytes of a row as it is stored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import Tensor

from megamem.token_tables.codec import PlainRows, QuantisedRows, RowCodec
from parallel.machine.refusals import naming
from pretrain.checkpoint.derived import main_name, scales_in
from pretrain.checkpoint.index import StoredItem
from pretrain.checkpoint.store.lazy_tensor import LazyTensor
from pretrain.checkpoint.store.safetensors_store import open_safetensors
from pretrain.checkpoint.store.torch_dist import TorchDistReader, open_torch_dist
from pretrain.checkpoint.store.torch_zip import renew_checksum
from pretrain.convert.format import OpenedCheckpoint
from pretrain.convert.huggingface.folder import table_bits
from pretrain.convert.names import HUGGINGFACE, NATIVE
from pretrain.errors import CheckpointError

_EXPORTED = "model."


@dataclass(frozen=True)
class RowPart:
    """Rows of a table, or some bytes of each, one after the other in a file.

    Attributes:
        path: the file.
        start: place of the first row's bytes in it.
        first_row: number of the first row in the table.
        num_rows: rows in the file.
        first_byte: first byte of a row that is here, out of B.
        num_bytes: bytes of a row that are here.
        item: archive in the file that the rows are in, with a checksum over them; None: they are in none.
    """

    path: Path
    start: int
    first_row: int
    num_rows: int
    first_byte: int
    num_bytes: int
    item: StoredItem | None = None

    def cut(self, records: Tensor) -> np.ndarray:
        """Bytes of whole rows, [n, B] uint8, that belong here."""
        found: np.ndarray = records.numpy()[:, self.first_byte : self.first_byte + self.num_bytes]
        return found

    def read(self, row_ids: np.ndarray) -> np.ndarray:
        """Bytes of rows, [n, num_bytes], by their numbers in the table.

        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            shape = (self.num_rows, self.num_bytes)
            mapped = np.memmap(self.path, np.uint8, "r", offset=self.start, shape=shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} cannot be read ({error})") from error
        return np.array(mapped[row_ids - self.first_row])

    def write(self, descriptor: int, row_ids: np.ndarray, content: np.ndarray) -> None:
        """Overwrite rows in an open file, neighbours at once.

        Args:
            row_ids: their numbers in the table, [n], ascending.
            content: [n, num_bytes] uint8.

        Raises:
            OSError: the disk refuses.
        """
        edges = [0, *(np.flatnonzero(np.diff(row_ids) != 1) + 1).tolist(), len(row_ids)]
        for begin, end in pairwise(edges):
            at = self.start + (int(row_ids[begin]) - self.first_row) * self.num_bytes
            left = np.ascontiguousarray(content[begin:end]).data.cast("B")
            while left:
                written = os.pwrite(descriptor, left, at)
                at, left = at + written, left[written:]

    def finish(self) -> None:
        """Bring the archive's checksum up to date, once all rows are written.

        Raises:
            CheckpointError: the archive is damaged.
            OSError: the disk refuses.
        """
        if self.item is not None:
            with naming(self.path):
                renew_checksum(self.path, self.item.start, self.item.num_bytes, self.start)


@dataclass(frozen=True)
class TablePlaces:
    """A table, or its main weights, as a checkpoint's files have it.

    Attributes:
        name: name of the tensor in the files.
        codec: encoding of its rows.
        parts: gives the parts that have some of the rows of these numbers, [n] ascending.
    """

    name: str
    codec: RowCodec
    parts: Callable[[np.ndarray], Iterator[RowPart]]

    def records(self, rows: Tensor) -> Tensor:
        """Bytes that stand for rows in the files, [n, B] uint8 of [n, W]."""
        return self.codec.encode(0, rows.to(self.codec.dtype))

    def within(self, row_ids: np.ndarray) -> Iterator[tuple[RowPart, int, int]]:
        """Parts that have some of these rows, each with the first and last place, exclusive, of those in `row_ids`."""
        for part in self.parts(row_ids):
            start, stop = np.searchsorted(row_ids, (part.first_row, part.first_row + part.num_rows)).tolist()
            if start < stop:
                yield part, start, stop


def places_of(opened: OpenedCheckpoint, folder: Path, tables: Sequence[str]) -> Mapping[str, tuple[TablePlaces, ...]]:
    """Places of tables by their names; of a checkpoint of ours, those of weights and of main weights that are there.

    Args:
        folder: folder of the checkpoint's files, or of copies of them.
        tables: names of tables that the checkpoint has.

    Raises:
        CheckpointError: rows cannot be overwritten in this format, or in these files.
    """
    if opened.format_name == NATIVE:
        return _native_tables(folder, tables)
    if opened.format_name == HUGGINGFACE:
        return {table: (_exported_table(opened, folder, table),) for table in tables}
    raise CheckpointError(
        f"{opened.path} is of the format {opened.format_name}, which patches are not applied to: convert it with `megamem "
        "checkpoint convert` to a run's folder, or to --format huggingface"
    )


def _native_tables(folder: Path, tables: Sequence[str]) -> dict[str, tuple[TablePlaces, ...]]:
    reader = open_torch_dist(folder)
    scales = scales_in(reader)
    for table in tables:
        if scales.get(table, 1.0) != 1.0:
            raise CheckpointError(
                f"{folder}: {table} is stored as rows times {scales[table]:g}, its decay (optimizer.state.scale), which "
                "would round patched rows: apply the patch to an export (`megamem checkpoint convert --format huggingface`)"
            )
    return {
        table: tuple(
            _stored_items(reader, folder, name) for name in (main_name(table), table) if name in reader.tensors
        )
        for table in tables
    }


def _stored_items(reader: TorchDistReader, folder: Path, name: str) -> TablePlaces:
    info = reader.tensors[name]
    size = info.dtype.itemsize

    def parts(row_ids: np.ndarray) -> Iterator[RowPart]:
        for item in reader.parts(name):
            (first_row, first_column), (num_rows, num_columns) = item.region.offset, item.region.shape
            start, stop = np.searchsorted(row_ids, (first_row, first_row + num_rows)).tolist()
            if start == stop:
                continue
            tensor = reader.item(item)
            if not _is_by_rows(tensor):
                raise CheckpointError(
                    f"{folder / item.file}: rows of {name} do not lie one after the other: convert the checkpoint with "
                    "`megamem checkpoint convert`"
                )
            yield RowPart(
                folder / item.file, tensor.start, first_row, num_rows, first_column * size, num_columns * size, item
            )

    return TablePlaces(name, PlainRows(info.shape[1], info.dtype), parts)


def _is_by_rows(tensor: LazyTensor) -> bool:
    """Tell whether the elements of a matrix lie in row-major order without gaps."""
    expected = (tensor.shape[1], 1)
    return all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(tensor.shape, tensor.strides, expected, strict=True)
    )


def _exported_table(opened: OpenedCheckpoint, folder: Path, table: str) -> TablePlaces:
    name, info = f"{_EXPORTED}{table}", opened.reader.tensors[table]
    width, bits = info.shape[1], table_bits(folder)
    codec = PlainRows(width, info.dtype) if bits is None else QuantisedRows(width, info.dtype, bits)
    place = open_safetensors(folder).place(name)
    part = RowPart(place.path, place.start, 0, info.shape[0], 0, codec.record_bytes)
    return TablePlaces(name, codec, lambda _: iter((part,)))
