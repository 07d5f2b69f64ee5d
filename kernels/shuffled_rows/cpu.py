"""`shuffled_rows` in C++, as a custom op of PyTorch: `torch.compile` takes it as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.shuffled_rows.op import SCHEMA, RowOperands, empty_result, from_custom_op, reciprocal


@torch.library.custom_op("megamem::cpu_shuffled_rows", mutates_args=(), schema=SCHEMA)
def _shuffled_rows(*operands: Any) -> tuple[Tensor, Tensor]:
    o = RowOperands(*operands)
    entries = o.entries.contiguous()
    rows, blocks = empty_result(*o)
    sizes = (o.num_keys, reciprocal(o.num_keys), o.num_rows, reciprocal(o.num_rows), o.first_row, o.num_bank_rows)
    cpp.call(
        *("shuffled_rows", "shuffled_rows", entries, rows, blocks if o.with_blocks else None, entries.numel()),
        *(*sizes, *o.round_keys),
    )
    return rows, blocks


_shuffled_rows.register_fake(empty_result)
shuffled_rows = from_custom_op(_shuffled_rows)
"""The function of `kernels.shuffled_rows.naive.shuffled_rows`."""
