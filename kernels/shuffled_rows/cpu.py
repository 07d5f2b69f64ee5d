"""`shuffled_rows` in C++, as a custom op of PyTorch: `torch.compile` takes it as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.shuffled_rows.op import empty_result, reciprocal


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


@torch.library.custom_op("megamem::cpu_shuffled_rows", mutates_args=())
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
    sizes = (num_keys, reciprocal(num_keys), num_rows, reciprocal(num_rows), first_row, num_bank_rows)
    key_0, key_1, key_2, key_3 = round_keys
    cpp.call(
        *("shuffled_rows", "shuffled_rows", entries, rows, blocks if with_blocks else None, entries.numel()),
        *(*sizes, key_0, key_1, key_2, key_3),
    )
    return rows, blocks


_shuffled_rows.register_fake(empty_result)
