"""Rows of a table as bytes, and back.

A row is one record with all that it takes to restore it, so that a row on disk is read from one place.

Legend: n rows at once, W columns, M slots of a token id (row v M + i is slot i of id v), r rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megamem.token_tables.form import TableForm

RowBlocks = Callable[[], Iterable[tuple[int, Tensor]]]
"""Passes over a table: each time the number of a first row, and rows from there on [n, W], until all have come."""

# Most bytes at once of the matrices that are summed for factors.
_MOST_GRAM_BYTES = 2**28


class RowCodec(ABC):
    """Encoding of one table's rows as records of `record_bytes` bytes.

    Attributes:
        dtype: dtype of the rows that come back.
        width: W.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width, self.dtype = width, dtype

    @property
    @abstractmethod
    def record_bytes(self) -> int:
        """Bytes of a row."""

    @property
    def shared_bytes(self) -> int:
        """Bytes that all rows need besides."""
        return 0

    @abstractmethod
    def encode(self, first_row: int, rows: Tensor) -> Tensor:
        """Records [n, record_bytes] uint8 of the rows from number `first_row` on, [n, W] of any floating dtype."""

    @abstractmethod
    def decode(self, row_ids: Tensor, records: Tensor) -> Tensor:
        """[n, W] of `dtype`, from their numbers [n] int64 and records [n, record_bytes] uint8."""


class PlainRows(RowCodec):
    """Rows as they are, in `dtype`."""

    @property
    def record_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def encode(self, first_row: int, rows: Tensor) -> Tensor:
        """See `RowCodec`."""
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, row_ids: Tensor, records: Tensor) -> Tensor:
        """See `RowCodec`."""
        return records.contiguous().view(self.dtype)


class QuantisedRows(RowCodec):
    """x = s c, with one scale per row and integer codes: s = max |x| / q, c = round(x / s), q = 2^(bits - 1) - 1.

    Symmetric, half to even. The paper of TIDE (J.1) gives bits and sizes, and no scheme. A record is the scale in fp32
    and the codes, of 4 bits two to a byte, the earlier one in the lower half.
    """

    def __init__(self, width: int, dtype: torch.dtype, bits: int) -> None:
        super().__init__(width, dtype)
        self.bits, self.largest = bits, 2 ** (bits - 1) - 1

    @property
    def record_bytes(self) -> int:
        return 4 + -(-self.width * self.bits // 8)

    def encode(self, first_row: int, rows: Tensor) -> Tensor:
        """See `RowCodec`."""
        wide = rows.double()
        # The scale that is stored is the one that codes are made for.
        scale = (wide.abs().amax(1, keepdim=True) / self.largest).float()
        codes = torch.where(scale > 0, wide / scale.double(), 0.0).round().clamp(-self.largest, self.largest)
        codes = codes.to(torch.int8).view(torch.uint8)
        if self.bits == 4:
            codes = torch.nn.functional.pad(codes & 15, (0, self.width % 2))
            codes = codes[:, ::2] | (codes[:, 1::2] << 4)
        return torch.cat((scale.view(torch.uint8), codes), 1)

    def decode(self, row_ids: Tensor, records: Tensor) -> Tensor:
        """See `RowCodec`."""
        # Not `contiguous`, which leaves one row alone its stride, of which a number of 4 bytes is no part.
        scale, codes = records[:, :4].clone(memory_format=torch.contiguous_format), records[:, 4:].contiguous()
        scale = scale.view(torch.float32)
        if self.bits == 4:
            # Shifted up, the sign of a half becomes that of the byte; shifted down as a number with sign, it stays.
            halves = torch.stack((codes << 4, codes & 0xF0), 2).view(torch.int8) >> 4
            signed = halves.flatten(1)[:, : self.width]
        else:
            signed = codes.view(torch.int8)
        wide = torch.promote_types(self.dtype, torch.float32)
        return (signed.to(wide) * scale.to(wide)).to(self.dtype)


class FactoredRows(RowCodec):
    """E_i = U_i B_i for each of the M tables of slots, the best approximation of rank r (TIDE, J.2).

    B_i are the r first right singular vectors, and U_i = E_i B_i^T. A record is a row of U_i.

    Attributes:
        bases: [M, r, W], B_i.
    """

    def __init__(self, bases: Tensor, dtype: torch.dtype) -> None:
        super().__init__(bases.shape[2], dtype)
        self.bases = bases.to(dtype)

    @property
    def record_bytes(self) -> int:
        return self.bases.shape[1] * self.dtype.itemsize

    @property
    def shared_bytes(self) -> int:
        return self.bases.numel() * self.bases.element_size()

    def encode(self, first_row: int, rows: Tensor) -> Tensor:
        """See `RowCodec`."""
        num_slots = len(self.bases)
        wide, bases = rows.double(), self.bases.double()
        slots = (first_row + torch.arange(len(rows))) % num_slots
        factors = wide.new_empty(len(rows), bases.shape[1])
        for slot in range(num_slots):
            of_slot = slots == slot
            factors[of_slot] = wide[of_slot] @ bases[slot].T
        return factors.to(self.dtype).view(torch.uint8)

    def decode(self, row_ids: Tensor, records: Tensor) -> Tensor:
        """See `RowCodec`."""
        wide = torch.promote_types(self.dtype, torch.float32)
        factors = records.contiguous().view(self.dtype).to(wide)
        slots = row_ids % len(self.bases)
        rows = factors.new_empty(len(factors), self.width)
        for slot in range(len(self.bases)):
            of_slot = slots == slot
            rows[of_slot] = factors[of_slot] @ self.bases[slot].to(wide)
        return rows.to(self.dtype)


def make_codec(
    form: TableForm, blocks: RowBlocks, *, width: int, num_slots: int, dtype: torch.dtype, bases: Tensor | None = None
) -> RowCodec:
    """The codec of a form, for the rows of one table. Factors take passes over the table, unless `bases` are known.

    Raises:
        ValueError: rows have no such rank.
    """
    if form.bits is not None:
        return QuantisedRows(width, dtype, form.bits)
    if form.is_factored:
        rank = form.rank_of(width)
        return FactoredRows(right_singular_vectors(blocks, num_slots, width, rank) if bases is None else bases, dtype)
    return PlainRows(width, dtype)


def right_singular_vectors(blocks: RowBlocks, num_slots: int, width: int, rank: int) -> Tensor:
    """[M, r, W] float64: of each slot's table E_i the r right singular vectors of the largest singular values.

    They are the eigenvectors of E_i^T E_i, which is summed over rows as they come: no table is ever there as a whole.
    In float64 singular values below 1e-8 of the largest one are noise, and so is what they add to a row.
    """
    at_once = max(1, _MOST_GRAM_BYTES // (8 * width * width))
    bases = []
    for first_slot in range(0, num_slots, at_once):
        grams = torch.zeros(min(at_once, num_slots - first_slot), width, width, dtype=torch.float64)
        for first_row, rows in blocks():
            slots = (first_row + torch.arange(len(rows))) % num_slots
            for index, gram in enumerate(grams):
                of_slot = rows[slots == first_slot + index].double()
                gram.addmm_(of_slot.T, of_slot)
        # Ascending, in columns.
        bases.append(torch.linalg.eigh(grams).eigenvectors[:, :, width - rank :].flip(2).transpose(1, 2))
    return torch.cat(bases).contiguous()
