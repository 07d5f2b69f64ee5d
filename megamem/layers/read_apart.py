"""Read of rows that no weight sums: each by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.banks.bank import TableLookup


def read_apart(lookup: TableLookup, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, J, V] of `rows` [T, J] int64 in a bank's values, of `dtype`."""
    num_rows = rows.shape[1]
    # A sum of its own for each row.
    bins = torch.arange(num_rows, dtype=torch.int32, device=rows.device).expand_as(rows).contiguous()
    ones = torch.ones(*rows.shape, 1, dtype=dtype, device=rows.device)
    read = lookup.read(rows, ones, None, bins, num_rows)
    # The width in full: there may be no token to infer it from.
    return read.view(len(rows), num_rows, read.shape[1] // num_rows)
