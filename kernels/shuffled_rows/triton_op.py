"""`shuffled_rows` in Triton: a program has some entries, which stay in registers from the first round to the last.

Launches are custom ops of PyTorch; nothing waits for the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launch import on_device_of
from kernels.common.ops import custom_op
from kernels.shuffled_rows.op import SCHEMA, empty_result, from_custom_op, reciprocal


@triton.jit
def _divided(h, n, reciprocal):
    """Quotient and remainder of `h` below 2^62 by `n`, uint64: see `reciprocal` in op.py."""
    quotient = tl.umulhi(h * 2, reciprocal)
    remainder = h - quotient * n
    one_less = remainder >= n
    return quotient + one_less.to(tl.uint64), tl.where(one_less, remainder - n, remainder)


@triton.jit
def _next_half(i, j, key, n, reciprocal):
    """(i + F(j)) mod n, with SplitMix64 as in kernels/common/hashing.py."""
    z = (j + 1) * 0x9E3779B97F4A7C15 + key
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    _, step = _divided((z >> 1) & 0x3FFFFFFFFFFFFFFF, n, reciprocal)
    total = i + step
    return tl.where(total >= n, total - n, total)


@triton.jit(do_not_specialize=["key_0", "key_1", "key_2", "key_3"])
def shuffled_rows_kernel(
    entries,
    rows,
    blocks,
    num_entries,
    num_keys,
    reciprocal_keys,
    num_rows,
    reciprocal_rows,
    first_row,
    num_bank_rows,
    key_0,
    key_1,
    key_2,
    key_3,
    WITH_BLOCKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """rows[e] and blocks[e] as in `naive.shuffled_rows`. The grid is (tiles of ENTRIES entries,)."""
    e = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    present = e < num_entries
    # Unsigned: shifts drag no sign along. The scalars are below 2^63.
    n = tl.cast(num_keys, tl.uint64)
    reciprocal = tl.cast(reciprocal_keys, tl.uint64) + tl.zeros([ENTRIES], tl.uint64)
    i, j = _divided(tl.load(entries + e, mask=present, other=0).to(tl.uint64), n, reciprocal)
    i, j = j, _next_half(i, j, tl.cast(key_0, tl.uint64), n, reciprocal)
    i, j = j, _next_half(i, j, tl.cast(key_1, tl.uint64), n, reciprocal)
    i, j = j, _next_half(i, j, tl.cast(key_2, tl.uint64), n, reciprocal)
    i, j = j, _next_half(i, j, tl.cast(key_3, tl.uint64), n, reciprocal)
    of_window = tl.cast(reciprocal_rows, tl.uint64) + tl.zeros([ENTRIES], tl.uint64)
    block, row = _divided(i * n + j, tl.cast(num_rows, tl.uint64), of_window)
    row += tl.cast(first_row, tl.uint64)
    bank = tl.cast(num_bank_rows, tl.uint64)
    row = tl.where(row >= bank, row - bank, row)
    tl.store(rows + e, row.to(rows.dtype.element_ty), mask=present)
    if WITH_BLOCKS:
        tl.store(blocks + e, block.to(blocks.dtype.element_ty), mask=present)


_ENTRIES = 512


@custom_op("triton_shuffled_rows", empty_result, schema=SCHEMA)
def _shuffled_rows(
    entries: Tensor,
    num_keys: int,
    round_keys: list[int],
    num_rows: int,
    first_row: int,
    num_bank_rows: int,
    with_blocks: bool,
) -> tuple[Tensor, Tensor]:
    entries = entries.contiguous()
    rows, blocks = empty_result(entries, num_keys, round_keys, num_rows, first_row, num_bank_rows, with_blocks)
    if num_entries := entries.numel():
        with on_device_of(entries):
            shuffled_rows_kernel[(-(-num_entries // _ENTRIES),)](
                *(entries, rows, blocks, num_entries, num_keys, reciprocal(num_keys), num_rows, reciprocal(num_rows)),
                *(first_row, num_bank_rows, *round_keys, with_blocks, _ENTRIES),
                num_warps=4,
            )
    return rows, blocks


shuffled_rows = from_custom_op(_shuffled_rows)
"""The function of `kernels.shuffled_rows.naive.shuffled_rows`."""
