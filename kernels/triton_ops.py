"""The three operations in Triton, as custom ops of PyTorch: `torch.compile` takes them as they are, and nothing waits for the device.

Legend: R table rows, T tokens, J rows read per token, M = T J entries, C column groups, W columns, B blocks of entries.

Importing this module imports Triton.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton.language as tl
from torch import Tensor

from kernels.gather_dot.triton_kernel import gather_dot_kernel
from kernels.gather_sum.triton_kernel import gather_sum_kernel
from kernels.pieces import check_contiguous, empty_products, empty_sums
from kernels.row_order import shared_order
from kernels.segment_accumulate.triton_kernel import segment_accumulate_kernel
from kernels.tiles import accumulate_tile, gather_tile, run_length


def sum_dtype(rows: Tensor) -> tl.dtype:
    """What rows of this type are added up in."""
    return tl.float64 if rows.dtype == torch.float64 else tl.float32


def on_device_of(rows: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(rows.device) if rows.is_cuda else nullcontext()


@torch.library.custom_op(
    "megamem::triton_sum_rows",
    mutates_args=(),
    schema="(Tensor table, Tensor ids, Tensor coef, Tensor? block, int num_blocks) -> Tensor",
)
def _sum_rows(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None, num_blocks: int) -> Tensor:
    check_contiguous(table)
    tokens, reads, groups = coef.shape
    width = table.shape[1]
    out = empty_sums(table, ids, coef, block, num_blocks)
    tile = gather_tile(width // groups, reads, tokens * groups * num_blocks)
    grid = (tokens, num_blocks * groups * tile.column_blocks(width // groups))
    if out.numel() == 0:
        return out
    ids, coef = ids.contiguous(), coef.contiguous()
    with on_device_of(table):
        gather_sum_kernel[grid](
            table,
            ids,
            coef,
            ids if block is None else block.contiguous(),
            out,
            reads,
            C=groups,
            W=width,
            B=num_blocks,
            ENTRIES=tile.entries,
            COLUMNS=tile.columns,
            SUM=sum_dtype(table),
            num_warps=tile.num_warps,
        )
    return out


_sum_rows.register_fake(empty_sums)


def sum_rows(table: Tensor, ids: Tensor, coef: Tensor, block: Tensor | None = None, num_blocks: int = 1) -> Tensor:
    """See `kernels.pieces.SumRows`."""
    out: Tensor = _sum_rows(table, ids, coef, block, num_blocks)
    return out


@torch.library.custom_op(
    "megamem::triton_dot_rows",
    mutates_args=(),
    schema="(Tensor table, Tensor ids, Tensor x, int num_groups, Tensor? block) -> Tensor",
)
def _dot_rows(table: Tensor, ids: Tensor, x: Tensor, num_groups: int, block: Tensor | None) -> Tensor:
    check_contiguous(table)
    tokens, reads = ids.shape
    width = table.shape[1]
    out = empty_products(table, ids, x, num_groups, block)
    if out.numel() == 0:
        return out
    tile = gather_tile(width // num_groups, reads, tokens * num_groups)
    ids, x = ids.contiguous(), x.contiguous()
    with on_device_of(table):
        gather_dot_kernel[(tokens, -(-reads // tile.entries), num_groups)](
            table,
            ids,
            x,
            ids if block is None else block.contiguous(),
            out,
            reads,
            C=num_groups,
            W=width,
            B=1 if block is None else x.shape[1] // width,
            ENTRIES=tile.entries,
            COLUMNS=tile.columns,
            SUM=sum_dtype(table),
            num_warps=tile.num_warps,
        )
    return out


_dot_rows.register_fake(empty_products)


def dot_rows(table: Tensor, ids: Tensor, x: Tensor, num_groups: int, block: Tensor | None = None) -> Tensor:
    """See `kernels.pieces.DotRows`."""
    out: Tensor = _dot_rows(table, ids, x, num_groups, block)
    return out


def sort_by_row(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The rows of all entries in ascending order, [M], and the entry that each belongs to, [M]; entries of one row keep their order."""
    rows = ids.flatten()
    if num_rows <= 2**31:
        # Half the passes of a radix sort.
        rows = rows.int()
    sorted_rows, order = rows.sort(stable=True)
    return sorted_rows, order


@torch.library.custom_op(
    "megamem::triton_accumulate",
    mutates_args=("accumulator",),
    schema="(Tensor(a!) accumulator, Tensor sorted_rows, Tensor order, Tensor coef, Tensor vec, Tensor? block) -> ()",
)
def _accumulate(
    accumulator: Tensor, sorted_rows: Tensor, order: Tensor, coef: Tensor, vec: Tensor, block: Tensor | None
) -> None:
    check_contiguous(accumulator)
    reads, groups = coef.shape[1:]
    width = accumulator.shape[1]
    num_blocks = 1 if block is None else vec.shape[1] // width
    coef, vec = coef.contiguous(), vec.contiguous()
    block = order if block is None else block.contiguous()
    tile = accumulate_tile(width // groups)
    longest = run_length(order.numel())
    sums = torch.float64 if accumulator.dtype == torch.float64 else torch.float32
    # The first level has no pieces to read: any tensor stands for them.
    pieces = accumulator
    num_items, stride, reach_before = order.numel(), 1, 0
    while True:
        num_longer = -(-num_items // longest)
        longer_pieces = accumulator.new_empty(num_longer, width, dtype=sums)
        with on_device_of(accumulator):
            segment_accumulate_kernel[(-(-num_items // tile.entries), groups * tile.column_blocks(width // groups))](
                accumulator,
                sorted_rows,
                order,
                coef,
                vec,
                block,
                pieces,
                longer_pieces,
                num_items,
                reads,
                stride,
                reach_before,
                reach_before + stride,
                FROM_ENTRIES=stride == 1,
                L=longest,
                C=groups,
                W=width,
                B=num_blocks,
                ITEMS=tile.entries,
                COLUMNS=tile.columns,
                SUM=sum_dtype(accumulator),
                num_warps=tile.num_warps,
            )
        # A piece belongs to a run that began before it: the first piece does not exist, so one alone needs no further level.
        if num_longer <= 1:
            return
        pieces, num_items = longer_pieces, num_longer
        reach_before, stride = reach_before + stride, stride * longest


@_accumulate.register_fake
def _(accumulator: Tensor, sorted_rows: Tensor, order: Tensor, coef: Tensor, vec: Tensor, block: Tensor | None) -> None:
    return None


def accumulate(accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, block: Tensor | None = None) -> None:
    """See `kernels.pieces.Accumulate`. Runs are summed in fp32 (fp64 for fp64) before they are added to the accumulator."""
    if coef.numel() == 0 or accumulator.shape[1] == 0:
        return
    sorted_rows, order = shared_order(ids, accumulator.shape[0], sort_by_row)
    _accumulate(accumulator, sorted_rows, order, coef, vec, block)
