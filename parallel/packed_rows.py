"""Row ids as the memory group exchanges them: as many half bytes per id as the bank's size needs.

An id, with its bin if a lookup sums into several, is a number below rows x bins. The papers' banks need 2.5 to 3.5
bytes. (The positions of a product grid, two bytes per value and the lists of the M best rows and columns, would take
2 + 4 M / K: more wherever K does not exceed the 128 rows that the first selection stage keeps, and as the ids' owner
alone knows the layer's shuffle, every rank would redo it.)

Legend: N ids of one rank, b whole bytes per id, g ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.layout import bytes_per_id, packed_bytes

_BYTES_OF_INT64 = 8


@dataclass(frozen=True)
class RowFormat:
    """Packing of the ids of one bank: b low bytes of each, then the odd half bytes, two ids to a byte.

    Attributes:
        num_rows: rows of the bank.
        num_bins: B, sums per token.
    """

    num_rows: int
    num_bins: int

    @property
    def _bytes_per_id(self) -> tuple[int, int]:
        """Whole bytes, and whether half a byte more."""
        return bytes_per_id(self.num_rows * self.num_bins)

    def num_bytes(self, num_ids: int) -> int:
        """Bytes of `num_ids` packed ids."""
        return packed_bytes(num_ids, self.num_rows * self.num_bins)

    def pack(self, rows: Tensor, bins: Tensor | None) -> Tensor:
        """One rank's ids.

        Args:
            rows: int64 in [0, num_rows), any shape with N elements.
            bins: of the same shape, int64 in [0, B); None: B is 1.

        Returns:
            [num_bytes(N)] uint8.
        """
        ids = rows if bins is None else bins * self.num_rows + rows
        whole, odd = self._bytes_per_id
        in_bytes = ids.reshape(-1, 1).contiguous().view(torch.uint8)
        parts = [in_bytes[:, :whole].flatten()]
        if odd:
            halves = in_bytes[:, whole]
            if ids.numel() % 2:
                halves = torch.cat([halves, halves.new_zeros(1)])
            parts.append(halves[0::2] | (halves[1::2] << 4))
        return torch.cat(parts)

    def unpack(self, packed: Tensor, num_ids: int) -> Tensor:
        """The ids of ranks that have equally many.

        Args:
            packed: [g num_bytes(N)] uint8, what `pack` made on each rank, one after the other.
            num_ids: N.

        Returns:
            [g N] int64, for `rows_and_bins`.
        """
        whole, odd = self._bytes_per_id
        of_ranks = packed.view(packed.numel() // max(1, self.num_bytes(num_ids)), self.num_bytes(num_ids))
        # The low bytes of an int64 come first, on every machine that PyTorch runs on.
        in_bytes = packed.new_zeros(of_ranks.shape[0], num_ids, _BYTES_OF_INT64)
        in_bytes[:, :, :whole] = of_ranks[:, : num_ids * whole].unflatten(1, (num_ids, whole))
        if odd:
            halves = of_ranks[:, num_ids * whole :]
            in_bytes[:, :, whole] = torch.stack([halves & 15, halves >> 4], dim=2).flatten(1)[:, :num_ids]
        return in_bytes.view(torch.int64).flatten()

    def rows_and_bins(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The int64 rows, and bins (None if B is 1), of unpacked ids of any shape."""
        return (ids, None) if self.num_bins == 1 else (ids % self.num_rows, ids // self.num_rows)
