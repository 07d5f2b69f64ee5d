"""Tables that are read where they lie, in host memory or in a file: rows come to the device when a token asks for them.

Legend: T tokens, J rows read per token, n rows at once, V columns of this rank.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.common.side_thread import side_thread
from megamem.token_tables.codec import RowCodec
from megamem.token_tables.rows import rows_of_addresses


class RowFetch(Protocol):
    """The values of a bank that is no parameter."""

    def announce(self, token_ids: Tensor) -> None:
        """Begin to fetch the rows of tokens [any shape] that are about to be read."""
        ...

    def table(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """A small table [n, V] and ids [T, J] in it, which stand for `rows` [T, J] of the whole one."""
        ...


class RecordBytes(Protocol):
    """Records of a table, as an array of bytes [rows, record_bytes] gives them."""

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """A copy of the records of rows [n]."""
        ...


class FetchedRows:
    """A `RowFetch` of records, which holds the rows of the newest tokens on the device.

    Rows are what the whole table has there, so what the kernels make of them is the same to the bit. A thread fetches
    what was announced while the model computes; tokens that were there before (a context that has grown by one token)
    cost nothing. What is held does not grow with the table.
    """

    def __init__(
        self,
        records: RecordBytes,
        codec: RowCodec,
        *,
        rows_per_token: int,
        part: int,
        num_parts: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            records: rows of the table, encoded, in memory or mapped from a file.
            part: number of the columns' part that this rank holds, of `num_parts` equal ones.
        """
        width = codec.width // num_parts
        self._records, self._codec, self._rows_per_token = records, codec, rows_per_token
        self._columns = slice(part * width, (part + 1) * width)
        self._held_ids = torch.empty(0, dtype=torch.int64, device=device)
        # A table is never without rows: kernels are asked for those of no token, too.
        self._held = torch.zeros(1, width, dtype=codec.dtype, device=device)
        self._thread: ThreadPoolExecutor | None = None
        self._fetching: Future[None] | None = None

    def announce(self, token_ids: Tensor) -> None:
        """See `RowFetch`."""
        self._wait()
        self._thread = self._thread or side_thread("rows", self._held.device)
        self._fetching = self._thread.submit(
            self._hold, rows_of_addresses(token_ids.unique().unsqueeze(0), self._rows_per_token)
        )

    def table(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowFetch`."""
        self._wait()
        rows = rows.to(self._held_ids.dtype)
        if not rows.numel():
            return self._held, rows
        places = self._places(rows)
        if places is None:
            self._hold(rows)
            places = self._places(rows)
            assert places is not None
        return self._held, places

    def _wait(self) -> None:
        if self._fetching is not None:
            # Errors of the thread are raised here.
            self._fetching.result()
            self._fetching = None

    def _places(self, rows: Tensor) -> Tensor | None:
        """Positions of rows among those held; None if one is not held."""
        if not self._held_ids.numel():
            return None
        places = torch.searchsorted(self._held_ids, rows).clamp_(max=len(self._held_ids) - 1)
        return places if torch.equal(self._held_ids[places], rows) else None

    def _hold(self, rows: Tensor) -> None:
        """Hold these rows and no others, and fetch those that are not held yet."""
        wanted = rows.unique()
        held = self._held.new_empty(len(wanted), self._held.shape[1])
        known = torch.isin(wanted, self._held_ids, assume_unique=True)
        if bool(known.any()):
            held[known] = self._held[torch.searchsorted(self._held_ids, wanted[known])]
        missing = wanted[~known].cpu()
        if missing.numel():
            records = torch.from_numpy(self._records[missing.numpy()])
            held[~known] = self._codec.decode(missing, records)[:, self._columns].to(held.device)
        self._held_ids, self._held = wanted, held
