"""`segment_accumulate` in Triton, as a custom op of PyTorch: nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.checks import check_contiguous
from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.row_order import shared_order
from kernels.common.tiles import accumulate_tile, run_length
from kernels.segment_accumulate.triton_kernel import segment_accumulate_kernel


def sort_by_row(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The rows of all entries in ascending order, and the entry that each belongs to, [M] both; a stable sort."""
    rows = ids.flatten()
    if num_rows <= 2**31:
        # Half the passes of a radix sort.
        rows = rows.int()
    sorted_rows, order = rows.sort(stable=True)
    return sorted_rows, order


@torch.library.custom_op("megamem::triton_segment_accumulate", mutates_args=("accumulator",))
def _segment_accumulate(
    accumulator: Tensor, sorted_rows: Tensor, order: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None
) -> None:
    check_contiguous(accumulator)
    reads, groups = coef.shape[1:]
    width = accumulator.shape[1]
    num_bins = 1 if bins is None else vec.shape[1] // width
    coef, vec = coef.contiguous(), vec.contiguous()
    bins = order if bins is None else bins.contiguous()
    tile = accumulate_tile(width // groups)
    longest = run_length(order.numel())
    sums = torch.float64 if accumulator.dtype == torch.float64 else torch.float32
    # The first level has no partial sums to read: any tensor stands for them.
    partials = accumulator
    num_items, stride, reach_before = order.numel(), 1, 0
    while True:
        num_longer = -(-num_items // longest)
        longer_partials = accumulator.new_empty(num_longer, width, dtype=sums)
        with on_device_of(accumulator):
            segment_accumulate_kernel[(-(-num_items // tile.entries), groups * tile.column_tiles(width // groups))](
                accumulator,
                sorted_rows,
                order,
                coef,
                vec,
                bins,
                partials,
                longer_partials,
                num_items,
                reads,
                stride,
                reach_before,
                reach_before + stride,
                FROM_ENTRIES=stride == 1,
                L=longest,
                C=groups,
                W=width,
                B=num_bins,
                ITEMS=tile.entries,
                COLUMNS=tile.columns,
                SUM=sum_dtype(accumulator),
                num_warps=tile.num_warps,
            )
        # A partial sum belongs to a run that began before it: the first does not exist, so one alone needs no further
        # level.
        if num_longer <= 1:
            return
        partials, num_items = longer_partials, num_longer
        reach_before, stride = reach_before + stride, stride * longest


@_segment_accumulate.register_fake
def _(accumulator: Tensor, sorted_rows: Tensor, order: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None) -> None:
    return None


def segment_accumulate(accumulator: Tensor, ids: Tensor, coef: Tensor, vec: Tensor, bins: Tensor | None = None) -> None:
    """The function of `kernels.segment_accumulate.naive.segment_accumulate`.

    The entries of a row are summed in fp32 (fp64 for fp64) before they are added to the accumulator.
    """
    if coef.numel() == 0 or accumulator.shape[1] == 0:
        return
    sorted_rows, order = shared_order(ids, accumulator.shape[0], sort_by_row)
    _segment_accumulate(accumulator, sorted_rows, order, coef, vec, bins)
