"""`shuffled_rows` in Triton, as a custom op of PyTorch: nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.common.launch import on_device_of
from kernels.shuffled_rows.op import empty_result, reciprocal
from kernels.shuffled_rows.triton_kernel import shuffled_rows_kernel

_ENTRIES = 512


def shuffled_rows(
    entries: Tensor,
    num_keys: int,
    round_keys: Sequence[int],
    num_rows: int,
    first_row: int,
    num_bank_rows: int,
    with_blocks: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The function of `kernels.shuffled_rows.naive.shuffled_rows`."""
    rows, blocks = _shuffled_rows(entries, num_keys, round_keys, num_rows, first_row, num_bank_rows, with_blocks)
    return rows, blocks if with_blocks else None


@torch.library.custom_op("megamem::triton_shuffled_rows", mutates_args=())
def _shuffled_rows(
    entries: Tensor,
    num_keys: int,
    round_keys: Sequence[int],
    num_rows: int,
    first_row: int,
    num_bank_rows: int,
    with_blocks: bool,
) -> tuple[Tensor, Tensor]:
    entries = entries.contiguous()
    rows, blocks = empty_result(entries, num_keys, round_keys, num_rows, first_row, num_bank_rows, with_blocks)
    if entries.numel() == 0:
        return rows, blocks
    key_0, key_1, key_2, key_3 = round_keys
    with on_device_of(entries):
        shuffled_rows_kernel[(-(-entries.numel() // _ENTRIES),)](
            entries,
            rows,
            blocks,
            entries.numel(),
            num_keys,
            reciprocal(num_keys),
            num_rows,
            reciprocal(num_rows),
            first_row,
            num_bank_rows,
            key_0,
            key_1,
            key_2,
            key_3,
            WITH_BLOCKS=with_blocks,
            ENTRIES=_ENTRIES,
            num_warps=4,
        )
    return rows, blocks


_shuffled_rows.register_fake(empty_result)
