"""`segment_accumulate` in Triton: entries are sorted by row, and each row of the accumulator is written by one program.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: M entries (T tokens x J reads), C column groups, W columns, B bins, L the longest run that is added up in one
go.

A run longer than L is cut where its position is a multiple of L. The first partial sum of a run goes to the
accumulator, the others to scratch: partial q of the next level is the sum of the entries from q L on, and exists only
if its run began before. The kernel is then launched on these partial sums as it was on the entries, level by level,
until one launch sees them all. At level l an item stands for the L^l entries from q L^l =: p on. Because the rows S are
sorted, one comparison tells what it is:

    it exists            if  S[p] = S[p - (1 + L + ... + L^(l - 1))]
    it continues item q-1 if  S[p] = S[p - (1 + L + ... + L^l)]

So nothing is scanned, no shape depends on the data, there are no atomics, and the order of additions depends on M
alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launch import accumulate_tile, on_device_of, run_length, sum_dtype
from kernels.common.tables import check_contiguous
from kernels.segment_accumulate.op import shared_order


@triton.jit(do_not_specialize=["num_items", "J", "stride", "reach_before", "reach"])
def segment_accumulate_kernel(
    accumulator,
    sorted_rows,
    order,
    coef,
    vec,
    bins,
    partials,
    longer_partials,
    num_items,
    J,
    stride,
    reach_before,
    reach,
    FROM_ENTRIES: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ITEMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    """One level; the grid is (tiles of ITEMS items, C x column tiles).

    stride is L^l, reach_before and reach the two sums above; items are entries (FROM_ENTRIES) or rows of `partials`.
    """
    PER_GROUP: tl.constexpr = W // C
    COLUMN_TILES: tl.constexpr = (PER_GROUP + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(1)
    group = tile // COLUMN_TILES
    columns = tile % COLUMN_TILES * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < PER_GROUP
    columns += group * PER_GROUP

    first = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    at = first * stride
    exists = first < num_items
    row = tl.load(sorted_rows + at, mask=exists, other=-1).to(tl.int64)
    if not FROM_ENTRIES:
        exists = exists & (at >= reach_before)
        exists = exists & (tl.load(sorted_rows + at - reach_before, mask=exists, other=-1) == row)
    continues = exists & (at >= reach)
    continues = continues & (tl.load(sorted_rows + at - reach, mask=continues, other=-1) == row)
    begins = exists & ((first % L == 0) | (continues == 0))

    sums = tl.zeros([ITEMS, COLUMNS], SUM)
    item = first
    going = begins
    num_going = tl.max(going.to(tl.int32), axis=0)
    while num_going > 0:
        mask = going[:, None] & in_row[None, :]
        if FROM_ENTRIES:
            entry = tl.load(order + item, mask=going, other=0).to(tl.int64)
            vector = entry // J
            if B > 1:
                vector = vector * B + tl.load(bins + entry, mask=going, other=0)
            scale = tl.load(coef + entry * C + group, mask=going, other=0).to(SUM)
            terms = tl.load(vec + (vector * W)[:, None] + columns[None, :], mask=mask, other=0).to(SUM)
            sums += tl.where(mask, scale[:, None] * terms, 0.0)
        else:
            sums += tl.load(partials + (item * W)[:, None] + columns[None, :], mask=mask, other=0)
        item += 1
        going = going & (item < num_items) & (item % L != 0)
        going = going & (tl.load(sorted_rows + item * stride, mask=going, other=-1) == row)
        num_going = tl.max(going.to(tl.int32), axis=0)

    whole = (begins & (continues == 0))[:, None] & in_row[None, :]
    into = accumulator + (row * W)[:, None] + columns[None, :]
    total = tl.load(into, mask=whole, other=0).to(SUM) + sums
    tl.store(into, total.to(accumulator.dtype.element_ty), mask=whole)
    cut = (begins & continues)[:, None] & in_row[None, :]
    tl.store(longer_partials + (first // L * W)[:, None] + columns[None, :], sums, mask=cut)


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
