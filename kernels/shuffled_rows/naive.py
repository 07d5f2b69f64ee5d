"""Reference of `shuffled_rows`: the formula in plain PyTorch, the oracle of every other implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.common.hashing import mix

NUM_ROUNDS = 4


def shuffled(entries: Tensor, num_keys: int, round_keys: Sequence[int]) -> Tensor:
    """A bijection of the N x N grid: a Feistel network whose halves are added modulo N.

    Each round replaces (i, j) by (j, (i + F(j)) mod N) with F a keyed hash, which is invertible for every N.

    Args:
        entries: int64 in [0, N^2), any shape: i N + j.
        num_keys: N, in [1, 2^31).
        round_keys: keys of F in each of the `NUM_ROUNDS` rounds; in [0, 2^63).

    Returns:
        int64 of the same shape, in the same range.
    """
    i, j = entries // num_keys, entries % num_keys
    for key in round_keys:
        # Bits 1 to 62 of the hash: int64 remainders of negative numbers would still be in range, but cost a correction.
        i, j = j, (i + ((mix(j, key) >> 1) & 0x3FFFFFFFFFFFFFFF) % num_keys) % num_keys
    return i * num_keys + j


def shuffled_rows(
    entries: Tensor,
    num_keys: int,
    round_keys: Sequence[int],
    num_rows: int,
    first_row: int,
    num_bank_rows: int,
    with_blocks: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rows of a bank behind entries of a layer's grid: shuffled, split into virtual block and row, moved to where the
    layer's window begins, wrapped around the bank.

    rows[e] = (p mod num_rows + first_row) mod num_bank_rows, blocks[e] = floor(p / num_rows), p = shuffled(e)

    Args:
        entries, num_keys, round_keys: arguments of `shuffled`.
        num_rows: rows of the window, in [1, num_bank_rows].
        first_row: first row of the window, in [0, num_bank_rows).
        num_bank_rows: rows of the bank, in [1, 2^62).
        with_blocks: return the blocks, too.

    Returns:
        Rows and blocks of the entries' shape, int32 where the largest of both fits, else int64; None for blocks that were
        not asked for.
    """
    permuted = shuffled(entries, num_keys, round_keys)
    rows, blocks = (permuted % num_rows + first_row) % num_bank_rows, permuted // num_rows
    last = max(num_bank_rows - 1, (num_keys**2 - 1) // num_rows)
    dtype = torch.int32 if last < 2**31 else torch.int64
    return rows.to(dtype), blocks.to(dtype) if with_blocks else None
