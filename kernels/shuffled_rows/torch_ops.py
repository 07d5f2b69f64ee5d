"""`shuffled_rows` in PyTorch, in slices of entries whose temporaries stay in cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.common.slices import token_slices
from kernels.shuffled_rows import naive
from kernels.shuffled_rows.op import empty_result


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
    where = (num_keys, round_keys, num_rows, first_row, num_bank_rows, with_blocks)
    flat = entries.flatten()
    rows, blocks = empty_result(flat, *where)
    # Half a dozen temporaries of 8 bytes per entry.
    for part in token_slices(len(flat), 16):
        rows[part], of_part = naive.shuffled_rows(flat[part], *where)
        if of_part is not None:
            blocks[part] = of_part
    return rows.view(entries.shape), blocks.view(entries.shape) if with_blocks else None
