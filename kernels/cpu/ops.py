"""The three operations on CPU tensors in C++, as custom ops of PyTorch: `torch.compile` takes them as they are.

Legend: R table rows, T tokens, J rows read per token, M = T J entries, C column groups, W columns, B blocks of entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.build import library
from kernels.pieces import check_contiguous, empty_products, empty_sums
from kernels.row_order import shared_order

# Row and operand types that are compiled; the numbers are those of `dispatch` in rows.cpp.
_PAIRS = {
    (torch.float32, torch.float32): 0,
    (torch.bfloat16, torch.bfloat16): 1,
    (torch.float32, torch.bfloat16): 2,
    (torch.bfloat16, torch.float32): 3,
    (torch.float64, torch.float64): 4,
}
# Buckets of entries by row: enough that the pages of one bucket's rows stay in the TLB, few enough that their counters stay in cache.
_MAX_BUCKETS_LOG2 = 12
_MAX_ENTRIES = 2**31


def _pair(rows: Tensor, operand: Tensor) -> tuple[int, Tensor]:
    """The number of the types, and the operand converted where its type has no number."""
    if (rows.dtype, operand.dtype) not in _PAIRS:
        operand = operand.to(rows.dtype)
    if (rows.dtype, operand.dtype) not in _PAIRS:
        raise ValueError(
            f"the memory kernels in C++ know fp32, bf16 and fp64 tables, and this one is {rows.dtype}: use torch"
        )
    return _PAIRS[rows.dtype, operand.dtype], operand.contiguous()


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(rows: Tensor, ids: Tensor) -> None:
    if rows.device.type != "cpu":
        raise ValueError(
            f"the memory kernels in C++ take tensors on the CPU, and the table is on {rows.device}: use triton or torch"
        )
    check_contiguous(rows)
    if ids.numel() >= _MAX_ENTRIES:
        raise ValueError(
            f"{ids.numel()} rows are read at once, and the memory kernels in C++ count to 2^31: use smaller microbatches"
        )


@torch.library.custom_op(
    "megamem::cpu_sum_rows",
    mutates_args=(),
    schema="(Tensor table, Tensor ids, Tensor coef, Tensor? block, int num_blocks) -> Tensor",
)
def _sum_rows(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None, num_blocks: int) -> Tensor:
    _check(table, ids)
    tokens, reads, groups = coef.shape
    pair, coef = _pair(table, coef)
    ids, block = ids.contiguous(), None if block is None else block.contiguous()
    out = empty_sums(table, ids, coef, block, num_blocks)
    sizes = (tokens, reads, groups, table.shape[1], num_blocks)
    library().megamem_sum_rows(
        pair, _at(table), _at(ids), _at(coef), _at(block), _at(out), *sizes, torch.get_num_threads()
    )
    return out


_sum_rows.register_fake(empty_sums)


def sum_rows(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None = None, num_blocks: int = 1) -> Tensor:
    """See `kernels.pieces.SumRows`."""
    out: Tensor = _sum_rows(table, ids, coef, block, num_blocks)
    return out


@torch.library.custom_op(
    "megamem::cpu_dot_rows",
    mutates_args=(),
    schema="(Tensor table, Tensor ids, Tensor x, int num_groups, Tensor? block) -> Tensor",
)
def _dot_rows(table: Tensor, ids: Tensor, x: Tensor, num_groups: int, block: Tensor | None) -> Tensor:
    _check(table, ids)
    dtype = x.dtype
    pair, x = _pair(table, x)
    ids, block = ids.contiguous(), None if block is None else block.contiguous()
    out = empty_products(table, ids, x, num_groups, block)
    sizes = (*ids.shape, num_groups, table.shape[1], x.shape[1] // table.shape[1])
    library().megamem_dot_rows(
        pair, _at(table), _at(ids), _at(x), _at(block), _at(out), *sizes, torch.get_num_threads()
    )
    return out.to(dtype)


_dot_rows.register_fake(empty_products)


def dot_rows(table: Tensor, ids: Tensor, x: Tensor, num_groups: int, block: Tensor | None = None) -> Tensor:
    """See `kernels.pieces.DotRows`."""
    out: Tensor = _dot_rows(table, ids, x, num_groups, block)
    return out


def _buckets(num_rows: int) -> tuple[int, int]:
    """The number of buckets, and the low bits that the rows of one may differ in."""
    shift = max(0, (num_rows - 1).bit_length() - _MAX_BUCKETS_LOG2)
    return ((num_rows - 1) >> shift) + 1, shift


@torch.library.custom_op(
    "megamem::cpu_bucket_order", mutates_args=(), schema="(Tensor ids, int num_rows) -> (Tensor, Tensor)"
)
def _bucket_order(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    ids = ids.contiguous()
    num_buckets, shift = _buckets(num_rows)
    order = torch.empty(ids.numel(), dtype=torch.int32)
    starts = torch.empty(num_buckets + 1, dtype=torch.int64)
    library().megamem_bucket_order(
        _at(ids), _at(order), _at(starts), ids.numel(), num_buckets, shift, torch.get_num_threads()
    )
    return order, starts


@_bucket_order.register_fake
def _(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(_buckets(num_rows)[0] + 1)


@torch.library.custom_op(
    "megamem::cpu_accumulate",
    mutates_args=("accumulator",),
    schema="(Tensor(a!) accumulator, Tensor ids, Tensor coef, Tensor vec, Tensor? block, Tensor order, Tensor starts) -> ()",
)
def _accumulate(
    accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, block: Tensor | None, order: Tensor, starts: Tensor
) -> None:
    _check(accumulator, ids)
    pair, vec = _pair(accumulator, vec)
    coef = coef.to(vec.dtype).contiguous()
    ids, block = ids.contiguous(), None if block is None else block.contiguous()
    width = accumulator.shape[1]
    sizes = (starts.numel() - 1, ids.numel(), ids.shape[1], coef.shape[2], width, vec.shape[1] // width)
    pointers = (_at(accumulator), _at(ids), _at(coef), _at(vec), _at(block), _at(order), _at(starts))
    library().megamem_accumulate(pair, *pointers, *sizes, torch.get_num_threads())


def accumulate(accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, block: Tensor | None = None) -> None:
    """See `kernels.pieces.Accumulate`. In the order of the entries, like the naive twin, and with its bits."""
    if ids.numel() == 0:
        return
    order, starts = shared_order(ids, accumulator.shape[0], _bucket_order)
    _accumulate(accumulator, ids, coef, vec, block, order, starts)
