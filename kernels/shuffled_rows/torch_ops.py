"""`shuffled_rows` in PyTorch, in slices of entries whose temporaries stay in cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.common.slices import token_slices
from kernels.shuffled_rows import naive


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
    flat = entries.flatten()
    # Half a dozen temporaries of 8 bytes per entry.
    parts = [
        naive.shuffled_rows(flat[part], num_keys, round_keys, num_rows, first_row, num_bank_rows, with_blocks)
        for part in token_slices(len(flat), 16)
    ]
    rows = torch.cat([rows for rows, _ in parts]) if parts else flat
    blocks = torch.cat([blocks for _, blocks in parts if blocks is not None]) if parts and with_blocks else flat
    return rows.view(entries.shape), blocks.view(entries.shape) if with_blocks else None
