"""Tables of memories in fewer bits, in exported folders: a record of bytes for every row.

Legend: W columns of a table, B bytes of a row's record: its scale, then codes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megamem.token_tables.codec import QuantisedRows
from pretrain.checkpoint.store.tensors import Region, TensorInfo, TensorReader

# Elements of a source that are read at a time.
_ELEMENTS_AT_A_TIME = 2**20
_TABLE = re.compile(r"model\.banks\.\d+\.\w+")


class QuantisedTables:
    """Exported tensors whose tables are records, uint8 [rows, B]; all others are as they were."""

    def __init__(self, source: TensorReader, bits: int) -> None:
        """Make records of `bits` bits per element of the tables of `source`, which has Hugging Face's names."""
        self._source = source
        self._codecs = {
            name: QuantisedRows(info.shape[1], info.dtype, bits)
            for name, info in source.tensors.items()
            if _TABLE.fullmatch(name)
        }
        self._tensors = {
            name: TensorInfo((info.shape[0], self._codecs[name].record_bytes), torch.uint8)
            if name in self._codecs
            else info
            for name, info in source.tensors.items()
        }

    @property
    def has_tables(self) -> bool:
        """True if there is any table."""
        return bool(self._codecs)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorReader`."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        codec = self._codecs.get(region.name)
        if codec is None:
            return self._source.read(region)
        return _converted(self._source, region, codec.width, torch.uint8, codec.encode)


class RestoredTables:
    """Tensors of an exported folder whose tables, records there, are rows again, as they were rounded."""

    def __init__(self, source: TensorReader, bits: int, widths: Mapping[str, int], dtype: torch.dtype) -> None:
        """Restore tables of `source`, which are `widths` wide by their names, in `dtype`."""
        self._source = source
        self._codecs = {
            name: QuantisedRows(widths[name], dtype, bits) for name in source.tensors if _TABLE.fullmatch(name)
        }
        self._tensors = {
            name: TensorInfo((info.shape[0], self._codecs[name].width), dtype) if name in self._codecs else info
            for name, info in source.tensors.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorReader`."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        codec = self._codecs.get(region.name)
        if codec is None:
            return self._source.read(region)

        def decode(first_row: int, records: Tensor) -> Tensor:
            return codec.decode(torch.arange(first_row, first_row + len(records)), records)

        return _converted(self._source, region, codec.record_bytes, codec.dtype, decode)


def _converted(
    source: TensorReader,
    region: Region,
    whole_width: int,
    dtype: torch.dtype,
    convert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """A region of a table whose rows are made of whole rows of `source`, a few of them at a time.

    Args:
        whole_width: elements of a row in `source`.
        dtype: dtype of the rows that are made.
        convert: the rows that are made of some, and of the number of the first of these.
    """
    (first, column), (rows, columns) = region.offset, region.shape
    out = torch.empty(rows, columns, dtype=dtype)
    at_once = max(1, _ELEMENTS_AT_A_TIME // whole_width)
    for start in range(0, rows, at_once):
        part = out[start : start + at_once]
        whole = source.read(Region(region.name, (first + start, 0), (len(part), whole_width)))
        part.copy_(convert(first + start, whole)[:, column : column + columns])
    return out
