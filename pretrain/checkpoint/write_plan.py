"""Division of a checkpoint's writing among ranks: every element of every tensor once, in balance.

A shard that several ranks hold may be written by any of them. Every rank knows the shards of all ranks, cuts them in
the same way into items of bounded size, and gives each item that has a choice to the rank with the fewest bytes so far.
So the ranks agree without a message, and a table is written by all its replicas, each a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from torch import Tensor

from megamem.parameters.shards import walk_shards
from pretrain.checkpoint.store.tensors import Region, TensorInfo, pieces

ITEM_BYTES = 1 << 26
"""Largest item in a file, which a thread copies from a device, and a reader holds, at a time."""


@dataclass(frozen=True)
class HeldShard:
    """A shard that a rank holds.

    Attributes:
        region: rectangle of the global tensor.
        tensor: the global tensor's shape and dtype.
        is_main: the shard is the one of its replicas that counts; the main ones tile the tensor.
    """

    region: Region
    tensor: TensorInfo
    is_main: bool


def held_shards(entries: Any) -> dict[HeldShard, Tensor]:
    """The shards in a sharded state dict, with their data in the shape of their regions."""
    return {shard: data for _, leaf in walk_shards(entries) for shard, data in [_held(leaf)]}


def _held(leaf: ShardedTensor) -> tuple[HeldShard, Tensor]:
    region = region_of(leaf)
    info = TensorInfo(tuple(leaf.global_shape), leaf.dtype)
    return HeldShard(region, info, is_main_replica(leaf.replica_id)), leaf.data.detach().view(region.shape)


def region_of(leaf: ShardedTensor) -> Region:
    """Region of a shard in its global tensor. Along a prepended axis it is one element long."""
    return Region(leaf.key, tuple(leaf.global_offset), (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape))


@dataclass(frozen=True)
class WritePlan:
    """Items that a rank writes.

    Attributes:
        items: regions of shards that it holds, in the order of their names.
        tensors: all ranks' tensors, by name.
    """

    items: tuple[Region, ...]
    tensors: Mapping[str, TensorInfo]


def plan_writes(held: Sequence[Iterable[HeldShard]], rank: int, item_bytes: int = ITEM_BYTES) -> WritePlan:
    """One rank's part in writing the shards of all ranks.

    Args:
        held: shards that each rank holds, by rank.
        rank: the rank that writes this part.
        item_bytes: largest item, unless a single element is larger.
    """
    tensors: dict[str, TensorInfo] = {}
    holders: dict[Region, list[int]] = {}
    main: set[Region] = set()
    for number, shards in enumerate(held):
        for shard in shards:
            known = tensors.setdefault(shard.region.name, shard.tensor)
            assert known == shard.tensor, f"ranks disagree on {shard.region.name}: {known}, {shard.tensor}"
            holders.setdefault(shard.region, []).append(number)
            if shard.is_main:
                assert shard.region not in main, f"{shard.region} has two main replicas"
                main.add(shard.region)
    _check_tiling(main, tensors)
    loads = [0] * len(held)
    mine: list[Region] = []
    # First the items without a choice.
    for region in sorted(main, key=lambda region: (len(holders[region]) > 1, region.name, region.offset)):
        itemsize = tensors[region.name].dtype.itemsize
        for item in pieces(region, max(1, item_bytes // itemsize)):
            writer = min(holders[region], key=lambda number: (loads[number], number))
            loads[writer] += item.numel * itemsize
            if writer == rank:
                mine.append(item)
    return WritePlan(tuple(sorted(mine, key=lambda item: (item.name, item.offset))), tensors)


def _check_tiling(main: set[Region], tensors: Mapping[str, TensorInfo]) -> None:
    """Assert that the main replicas have as many elements as the tensors: a wrong layout must not be saved."""
    found = dict.fromkeys(tensors, 0)
    for region in main:
        found[region.name] += region.numel
    for name, info in tensors.items():
        assert found[name] == math.prod(info.shape), f"shards of {name} have {found[name]} elements, not {info.shape}"


def data_of(items: Iterable[Region], held: Mapping[HeldShard, Tensor]) -> dict[Region, Tensor]:
    """The data of items, as views of the shards that they are cut from."""
    by_name: dict[str, list[tuple[Region, Tensor]]] = {}
    for shard, data in held.items():
        by_name.setdefault(shard.region.name, []).append((shard.region, data))
    return {item: _cut_from(item, by_name[item.name]) for item in items}


def _cut_from(item: Region, shards: Iterable[tuple[Region, Tensor]]) -> Tensor:
    for region, data in shards:
        start = tuple(a - b for a, b in zip(item.offset, region.offset, strict=True))
        if all(
            0 <= low <= low + size <= whole for low, size, whole in zip(start, item.shape, region.shape, strict=True)
        ):
            return data[tuple(slice(low, low + size) for low, size in zip(start, item.shape, strict=True))]
    raise AssertionError(f"{item} is no part of what this rank holds")


def with_storage_of_its_own(tensor: Tensor) -> Tensor:
    """A tensor's elements on the CPU, as a whole storage: `torch.save` writes whole storages. CPU memory is shared."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return torch.from_numpy(flat.numpy()).view(tensor.dtype).view(tensor.shape)
