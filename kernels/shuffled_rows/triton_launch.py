"""`shuffled_rows` in Triton, as a custom op of PyTorch: nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common.launch import on_device_of
from kernels.shuffled_rows.op import SCHEMA, RowOperands, empty_result, from_custom_op, reciprocal
from kernels.shuffled_rows.triton_kernel import shuffled_rows_kernel

_ENTRIES = 512


@torch.library.custom_op("megamem::triton_shuffled_rows", mutates_args=(), schema=SCHEMA)
def _shuffled_rows(*operands: Any) -> tuple[Tensor, Tensor]:
    o = RowOperands(*operands)
    entries = o.entries.contiguous()
    rows, blocks = empty_result(*o)
    if entries.numel() == 0:
        return rows, blocks
    with on_device_of(entries):
        shuffled_rows_kernel[(-(-entries.numel() // _ENTRIES),)](
            entries,
            rows,
            blocks,
            entries.numel(),
            o.num_keys,
            reciprocal(o.num_keys),
            o.num_rows,
            reciprocal(o.num_rows),
            o.first_row,
            o.num_bank_rows,
            *o.round_keys,
            WITH_BLOCKS=o.with_blocks,
            ENTRIES=_ENTRIES,
            num_warps=4,
        )
    return rows, blocks


_shuffled_rows.register_fake(empty_result)
shuffled_rows = from_custom_op(_shuffled_rows)
"""The function of `kernels.shuffled_rows.naive.shuffled_rows`."""
