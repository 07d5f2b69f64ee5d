"""Every element is written once over all ranks, in balance, in items of bounded size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pretrain.checkpoint.store.tensors import Region, TensorInfo
from pretrain.checkpoint.write_plan import HeldShard, data_of, plan_writes, with_storage_of_its_own

TABLE = TensorInfo((8, 6), torch.float32)
NORM = TensorInfo((5,), torch.bfloat16)


def part(name: str, info: TensorInfo, offset: tuple[int, ...], shape: tuple[int, ...], *, main: bool) -> HeldShard:
    return HeldShard(Region(name, offset, shape), info, main)


def halves(*, main: bool) -> list[HeldShard]:
    return [part("table", TABLE, (0, column), (8, 3), main=main) for column in (0, 3)]


def written(held: list[list[HeldShard]], item_bytes: int) -> list[tuple[Region, ...]]:
    return [plan_writes(held, rank, item_bytes).items for rank in range(len(held))]


def elements(items: tuple[Region, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (item.name, tuple(start + index for start, index in zip(item.offset, inside, strict=True)))
        for item in items
        for inside in torch.cartesian_prod(*map(torch.arange, item.shape)).view(item.numel, -1).tolist()
    ]


@pytest.mark.parametrize("item_bytes", [1, 16, 24, 40, 1 << 20])
def test_every_element_is_written_once_by_a_rank_that_holds_it(item_bytes: int) -> None:
    norm = part("norm", NORM, (0,), (5,), main=True)
    (left, right), (left_copy, right_copy) = halves(main=True), halves(main=False)
    held = [[left, norm], [right, replace(norm, is_main=False)], [left_copy], [right_copy, left_copy]]
    plans = written(held, item_bytes)
    everything = [element for items in plans for element in elements(items)]
    assert len(everything) == len(set(everything)) == 8 * 6 + 5
    for items, shards in zip(plans, held, strict=True):
        for item in items:
            info = TABLE if item.name == "table" else NORM
            assert item.numel * info.dtype.itemsize <= max(item_bytes, info.dtype.itemsize)
            mine = [shard.region for shard in shards if shard.region.name == item.name]
            assert any(
                all(
                    a <= b and b + n <= a + m
                    for a, m, b, n in zip(r.offset, r.shape, item.offset, item.shape, strict=True)
                )
                for r in mine
            )
    assert plan_writes(held, 0, item_bytes).tensors == {"table": TABLE, "norm": NORM}


def test_replicas_share_a_table_and_what_has_no_choice_counts_first() -> None:
    whole = part("table", TABLE, (0, 0), (8, 6), main=True)
    copies = [replace(whole, is_main=False)] * 3
    loads = [sum(item.numel for item in items) for items in written([[whole], *([copy] for copy in copies)], 24)]
    assert loads == [12, 12, 12, 12]
    # The first rank has 24 elements of its own.
    own = TensorInfo((24,), torch.float32)
    held = [[whole, part("own", own, (0,), (24,), main=True)], *([copy] for copy in copies[:1])]
    assert [sum(item.numel for item in items) for items in written(held, 24)] == [36, 36]


def test_copies_that_are_cut_otherwise_are_left_alone() -> None:
    """The optimizer state of an embedding that two stages hold is so, split over their ranks at other places."""
    first = [part("table", TABLE, (0, 0), (3, 6), main=True), part("table", TABLE, (3, 0), (5, 6), main=True)]
    second = [part("table", TABLE, (0, 0), (4, 6), main=False), part("table", TABLE, (4, 0), (4, 6), main=False)]
    plans = written([first[:1], first[1:], second[:1], second[1:]], 1 << 20)
    assert [[item.shape for item in items] for items in plans] == [[(3, 6)], [(5, 6)], [], []]


def test_what_was_laid_out_wrongly_is_not_saved() -> None:
    left, right = halves(main=True)
    with pytest.raises(AssertionError, match="24 elements"):
        plan_writes([[left]], 0)
    with pytest.raises(AssertionError, match="two main replicas"):
        plan_writes([[left, right], [right]], 0)
    with pytest.raises(AssertionError, match="ranks disagree on table"):
        plan_writes([[left], [replace(right, tensor=TensorInfo((8, 6), torch.bfloat16))]], 0)


def test_items_are_views_of_the_shards() -> None:
    table = torch.arange(24.0).view(8, 3)
    left, right = halves(main=True)
    held = {left: table, right: table + 100}
    items = [Region("table", (2, 3), (2, 3)), Region("table", (0, 0), (1, 2))]
    data = data_of(items, held)
    assert torch.equal(data[items[0]], table[2:4] + 100)
    assert torch.equal(data[items[1]], table[:1, :2])
    table.zero_()
    assert not data[items[1]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_an_item_is_the_whole_of_its_storage_and_costs_no_memory(dtype: torch.dtype) -> None:
    table = torch.arange(24).to(dtype).view(8, 3)
    item = with_storage_of_its_own(table[2:4])
    assert torch.equal(item, table[2:4])
    assert item.untyped_storage().nbytes() == 6 * dtype.itemsize
    assert item.data_ptr() == table[2].data_ptr()
    column = with_storage_of_its_own(table[:, 1])
    assert torch.equal(column, table[:, 1])
    assert column.untyped_storage().nbytes() == 8 * dtype.itemsize
    assert with_storage_of_its_own(torch.tensor(3.0)).shape == ()
