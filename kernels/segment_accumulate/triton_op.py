"""`segment_accumulate` in Triton: each warp adds up a run of entries that are sorted by row.

Launches are custom ops of PyTorch; nothing waits for the device.

Legend: M entries (T tokens x J reads), C column groups, W columns, B bins. Slot s is entries [s BLOCK, (s + 1) BLOCK).

**Order of additions.** The entries of a row, in their order, are cut into blocks of BLOCK. The first block is added to
the accumulator entry by entry; each of the others is added up from zero. The sums of these are then items of the row as
its entries were: the first BLOCK of them are added to the accumulator one by one, each BLOCK that follow are added up
from zero, and so on, level by level. So a row's bits depend on its own entries alone, and are those of the naive loop
for up to BLOCK of them.

**Rows that others hold** are numbers below zero, or those of the accumulator's rows and above, so that their entries are
sorted before and behind all others. No block of theirs begins anywhere, and nothing else of them is read.

**Work.** A run is the blocks that begin in some consecutive slots, about as many entries for every run, whatever the
rows. Where the row of a slot's first entry has a later block that begins in the slot, this is the only such block
there: its sum gets the slot's place in scratch. No shape depends on the data, and there are no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launch import on_device_of, sum_dtype
from kernels.common.ops import custom_op
from kernels.common.rounding import Rounding
from kernels.common.rounding_triton import round_stochastically
from kernels.common.tables import check_contiguous, row_dtype
from kernels.common.tiles import ACCUMULATE_AHEAD, accumulate_tile, slots_per_run
from kernels.segment_accumulate.op import numbers_of, shared_order

BLOCK = 128
"""Entries of a row that are added up one after the other. Part of the order of additions, so the same for every shape.

Longer blocks need less scratch memory and fewer launches, shorter ones make runs more alike."""
_MAX_ENTRIES = 2**31 - 2 * BLOCK


@triton.jit(do_not_specialize=["num_slots", "slots_per_run", "key", "first_row", "first_column"])
def segment_accumulate_kernel(
    accumulator,
    sorted_rows,
    order,
    cuts,
    coef,
    vec,
    bins,
    partials,
    num_slots,
    slots_per_run,
    key,
    first_row,
    first_column,
    BLOCK: tl.constexpr,
    J: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    RUNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    SUM: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Blocks of entries; the grid is (tiles of RUNS runs, C x column tiles).

    The loads of AHEAD entries of each run are under way at once: their rows and places, then all that follows from
    these. What belongs to a run is [RUNS, 1], so each thread loads what it needs, and threads exchange nothing.
    """
    PER_GROUP: tl.constexpr = W // C
    COLUMN_TILES: tl.constexpr = (PER_GROUP + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(1)
    group = tile // COLUMN_TILES
    columns = (tile % COLUMN_TILES * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    in_row = columns < PER_GROUP
    columns += group * PER_GROUP

    slot = (tl.program_id(0) * RUNS + tl.arange(0, RUNS)[:, None]) * slots_per_run
    first = tl.load(cuts + tl.minimum(slot, num_slots))
    length = tl.load(cuts + tl.minimum(slot + slots_per_run, num_slots)) - first
    sorted_rows += first
    order += first
    coef += group
    vec += columns
    accumulator += columns
    partials += columns
    # The row of the entry before: -1 before the first, and behind a run's end, which closes its last block.
    before = tl.load(sorted_rows - 1, mask=(length > 0) & (first > 0), other=-1)
    # A run begins with a block.
    began = tl.full([RUNS, 1], -BLOCK, tl.int32)
    into = partials + tl.zeros([RUNS, 1], tl.int32)
    onto = tl.zeros([RUNS, 1], tl.int1)
    sums = tl.zeros([RUNS, COLUMNS], SUM)
    for start in range(0, tl.max(length) + 1, AHEAD):
        rows = ()
        entries = ()
        for ahead in tl.static_range(AHEAD):
            present = start + ahead < length
            rows += (tl.load(sorted_rows + (start + ahead), mask=present, other=-1),)  # type: ignore[assignment]
            entries += (tl.load(order + (start + ahead), mask=present, other=0).to(tl.uint32),)  # type: ignore[assignment]
        scales = ()
        terms = ()
        held = ()
        for ahead in tl.static_range(AHEAD):
            present = start + ahead < length
            vector = (entries[ahead] // J).to(tl.int64)
            if B > 1:
                vector = vector * B + tl.load(bins + entries[ahead], mask=present, other=0)
            scales += (tl.load(coef + entries[ahead].to(tl.int64) * C, mask=present, other=0),)  # type: ignore[assignment]
            terms += (tl.load(vec + vector * W, mask=present & in_row, other=0),)
            if ahead == 0:
                opens = present & (rows[ahead] != before)
            else:
                opens = present & (rows[ahead] != rows[ahead - 1])
            held += (tl.load(accumulator + rows[ahead].to(tl.int64) * W, mask=opens & in_row, other=0),)
        for ahead in tl.static_range(AHEAD):
            at = start + ahead
            opens = rows[ahead] != before
            begins = opens | (at - began == BLOCK)
            ends = begins & (before >= 0) & (at > 0) & in_row
            from_zero = partials + ((first + at).to(tl.uint32) // BLOCK).to(tl.int64) * W
            if ROUND:
                # Rows and scratch have different types.
                rounded = round_stochastically(sums, key, before.to(tl.int64) + first_row, columns + first_column)
                tl.store(accumulator + before.to(tl.int64) * W, rounded, mask=ends & onto)
                tl.store(into, sums, mask=ends & (onto == 0))
                into = tl.where(begins, from_zero, into)
                onto = tl.where(begins, opens, onto)
            else:
                tl.store(into, sums, mask=ends)
                onto_row = accumulator + rows[ahead].to(tl.int64) * W
                into = tl.where(begins, tl.where(opens, onto_row, from_zero), into)
            began = tl.where(begins, at, began)
            sums = tl.where(begins, held[ahead].to(SUM), sums)
            sums += scales[ahead].to(SUM) * terms[ahead].to(SUM)
            before = rows[ahead]


@triton.jit(do_not_specialize=["num_slots", "num_items", "stride", "before", "key", "first_row", "first_column"])
def add_block_sums_kernel(
    accumulator,
    sorted_rows,
    numbers,
    partials,
    longer_partials,
    num_slots,
    num_items,
    stride,
    before,
    key,
    first_row,
    first_column,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    ITEMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
    ROUND: tl.constexpr,
):
    """A level of sums of blocks; the grid is (tiles of ITEMS items, column tiles).

    At level l an item stands for stride = BLOCK^(l - 1) later blocks of its row; before = BLOCK + ... + BLOCK^(l - 1)
    of these are those of the levels below. Item q is of the first such blocks to begin in slots [q stride, (q + 1)
    stride), if there are any.
    """
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    in_row = columns < W
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)[:, None]
    slot = item * stride
    number = tl.load(numbers + slot, mask=item < num_items, other=0) - 1
    first = before + tl.cdiv(tl.maximum(number - before, 0), stride) * stride
    skipped = first - number
    exists = (number >= 0) & (skipped < stride)
    slot += skipped
    exists = exists & (tl.load(numbers + slot, mask=exists & (slot < num_slots), other=0) == first + 1)
    index = (first - before) // stride
    begins = exists & (index % BLOCK == 0)
    onto_row = begins & (index == 0)
    row = tl.load(sorted_rows + slot.to(tl.int64) * BLOCK, mask=begins, other=0).to(tl.int64)
    into = accumulator + row * W + columns
    longer = longer_partials + (item // BLOCK).to(tl.int64) * W + columns
    sums = tl.load(into, mask=onto_row & in_row, other=0).to(SUM)
    going = begins
    left = BLOCK
    while (tl.max(going.to(tl.int32)) > 0) & (left > 0):
        sums += tl.load(partials + item.to(tl.int64) * W + columns, mask=going & in_row, other=0)
        item += 1
        slot += stride
        first += stride
        left -= 1
        going = going & (tl.load(numbers + slot, mask=going & (slot < num_slots), other=0) == first + 1)
    if ROUND:
        sums_of_rows = round_stochastically(sums, key, row + first_row, columns + first_column)
    else:
        sums_of_rows = sums
    tl.store(into, sums_of_rows, mask=onto_row & in_row)
    tl.store(longer, sums, mask=begins & (index > 0) & in_row)


def sort_by_row(ids: Tensor, num_rows: int) -> tuple[Tensor, ...]:
    """Entries in ascending order of their rows, a stable sort, and where blocks begin among them.

    Returns:
        The row of each entry and the entry itself, [M] both, then `block_starts` of the rows.
    """
    # Half the passes of a radix sort, where 32 bits are enough.
    sorted_rows, order = ids.flatten().to(row_dtype(num_rows)).sort(stable=True)
    return sorted_rows, order, *block_starts(sorted_rows, num_rows)


def block_starts(sorted_rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """For each slot the position of the first block that begins there or later, and that block's number in its row.

    Rows are of [0, num_rows); others have no blocks.

    Returns:
        cuts: [slots + 1], int32; the last is where the last block ends.
        numbers: [slots], int32; 0 for the first block of a row, and where none begins in the slot.
    """
    num_entries, device = sorted_rows.numel(), sorted_rows.device
    at = torch.arange(0, num_entries, BLOCK, device=device, dtype=torch.int32)
    ends = torch.linspace(0, num_rows - 1, 2, device=device, dtype=sorted_rows.dtype)
    rows = torch.cat([sorted_rows[::BLOCK], ends])
    start, (first, _) = torch.searchsorted(sorted_rows, rows, out_int32=True).split([len(at), 2])
    stop, (_, last) = torch.searchsorted(sorted_rows, rows, out_int32=True, right=True).split([len(at), 2])
    numbers = (at - start + (BLOCK - 1)) // BLOCK
    begin = start + numbers * BLOCK
    cuts = torch.cat([torch.minimum(begin, stop), last.unsqueeze(0)]).clamp(first, last)
    # A block that is cut off, as its row is not of these, begins elsewhere.
    return cuts, torch.where((begin < stop) & (begin == cuts[:-1]), numbers, 0)


@custom_op("triton_segment_accumulate", mutates=("accumulator",))
def _segment_accumulate(
    accumulator: Tensor,
    sorted_rows: Tensor,
    order: Tensor,
    cuts: Tensor,
    block_numbers: Tensor,
    coef: Tensor,
    vec: Tensor,
    bins: Tensor | None,
    rounding: list[int],
) -> None:
    _, reads, groups = coef.shape
    width, num_slots = accumulator.shape[1], block_numbers.numel()
    num_bins = 1 if bins is None else vec.shape[1] // width
    tile = accumulate_tile(width // groups)
    slots = slots_per_run(num_slots)
    grid = -(-num_slots // (slots * tile.entries)), groups * tile.column_tiles(width // groups)
    partials = accumulator.new_empty(num_slots, width, dtype=_sum_type(accumulator.dtype))
    with on_device_of(accumulator):
        segment_accumulate_kernel[grid](
            *(accumulator, sorted_rows, order, cuts, coef.contiguous(), vec.contiguous()),
            *(order if bins is None else bins.contiguous(), partials, num_slots, slots, *(rounding or (0, 0, 0))),
            *(BLOCK, reads, groups, width, num_bins, tile.entries, tile.columns, ACCUMULATE_AHEAD),
            *(sum_dtype(accumulator.dtype), bool(rounding)),
            num_warps=tile.num_warps,
            # Products of bf16 are exact in fp32: only those of wider types would be rounded otherwise.
            enable_fp_fusion=coef.dtype == vec.dtype == torch.bfloat16,
        )
        _add_block_sums(accumulator, sorted_rows, block_numbers, partials, rounding)


def _sum_type(accumulator: torch.dtype) -> torch.dtype:
    return torch.float64 if accumulator == torch.float64 else torch.float32


def _add_block_sums(
    accumulator: Tensor, sorted_rows: Tensor, block_numbers: Tensor, partials: Tensor, rounding: list[int]
) -> None:
    """Add the sums of all but the first block of each row, [slots, W], level by level."""
    width, num_slots = accumulator.shape[1], block_numbers.numel()
    tile = accumulate_tile(width)
    stride, before = 1, 0
    key, *place = rounding or [0, 0, 0]
    # The first slot has no later block of a row.
    while num_slots - 1 > before:
        num_items = -(-num_slots // stride)
        longer = partials.new_empty(-(-num_items // BLOCK), width)
        # A row is rounded once more at every level that it has sums of.
        key += 1
        add_block_sums_kernel[(-(-num_items // tile.entries), tile.column_tiles(width))](
            *(accumulator, sorted_rows, block_numbers, partials, longer),
            *(num_slots, num_items, stride, before, key, *place),
            *(BLOCK, width, tile.entries, tile.columns, sum_dtype(accumulator.dtype), bool(rounding)),
            num_warps=tile.num_warps,
        )
        partials, stride = longer, stride * BLOCK
        before += stride


def segment_accumulate(
    accumulator: Tensor,
    ids: Tensor,
    coef: Tensor,
    vec: Tensor,
    bins: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """The function of `kernels.segment_accumulate.naive.segment_accumulate`, in the order of additions told above.

    Rounding, to which each block is an entry, makes a bf16 row once, and once more per level of later blocks that it has.

    Raises:
        ValueError: the accumulator has strides or sums in less than fp32, or too many rows are read at once.
    """
    check_contiguous(accumulator)
    if (accumulator.dtype == torch.bfloat16) != (rounding is not None) or accumulator.dtype == torch.float16:
        raise ValueError(
            f"the accumulator is {accumulator.dtype}: gradients of tables are summed in fp32 or fp64, or in bf16 with a "
            "rounding"
        )
    if ids.numel() > _MAX_ENTRIES:
        raise ValueError(
            f"{ids.numel()} rows are read at once, and the memory kernels count to {_MAX_ENTRIES}: use smaller "
            "microbatches"
        )
    if coef.numel() == 0 or accumulator.shape[1] == 0:
        return
    sorted_rows, order, cuts, numbers = shared_order(ids, accumulator.shape[0], sort_by_row)
    _segment_accumulate(accumulator, sorted_rows, order, cuts, numbers, coef, vec, bins, numbers_of(rounding))
