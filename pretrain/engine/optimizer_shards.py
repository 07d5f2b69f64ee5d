"""Optimizer state as checkpoint entries, without gathering it.

Megatron's distributed optimizer gives each data-parallel rank a range of the flattened parameters. Such a range, cut at
the borders of its parameters, is a few rectangles of each parameter's own shape; each is saved, and loaded in place, as
a shard of a tensor that has the parameter's global shape. So no rank holds more than its share, no rank talks to
another, and any layout can read what another wrote.

(Megatron's own `fully_reshardable` format gathers the whole state of a stage on every rank, and in 0.16.1 it takes a
wrong slice of every parameter behind a padded bucket: with tied embeddings and interleaved stages it saves garbage
without a word.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megamem.parameters.shards import walk_shards
from pretrain.config.updates import STATE_PREFIX
from pretrain.rectangles import rectangles_of_range


def leaves_by_parameter(entries: Any) -> dict[Tensor, list[ShardedTensor]]:
    """The shards of a model's `sharded_state_dict` by the parameter that they are (views of)."""
    found: dict[Tensor, list[ShardedTensor]] = {}
    for parameter, shard in walk_shards(entries):
        found.setdefault(parameter, []).append(shard)
    return found


def state_entries(
    parameter: Tensor, leaves: Sequence[ShardedTensor], start: int, stop: int, state: dict[str, Tensor]
) -> dict[str, ShardedTensor]:
    """Checkpoint entries for one rank's range of one parameter's optimizer state.

    Args:
        parameter: the model parameter.
        leaves: its shards in the model's checkpoint.
        start: first position of the range in the flattened parameter.
        stop: the position after its last.
        state: flat tensors [stop - start] by name, or such in the whole parameter's shape, whose rows may lie apart; the
            entries are views of them.

    Returns:
        Shards of tensors named `optimizer.state.<name>.<parameter's global name>`.
    """
    entries = {}
    for leaf in leaves:
        assert leaf.prepend_axis_num == 0, f"{leaf.key} is stacked over layers: use names with layer numbers"
        assert leaf.data.is_contiguous() or leaf.data.shape == parameter.shape
        leaf_start = leaf.data.storage_offset() - parameter.storage_offset()
        low, high = max(start, leaf_start), min(stop, leaf_start + leaf.data.numel())
        for part in rectangles_of_range(leaf.local_shape, low - leaf_start, high - leaf_start):
            first = leaf_start + part.flat_start - start
            offset = tuple(a + b for a, b in zip(leaf.global_offset, part.offset, strict=True))
            for name, tensor in state.items():
                key = f"{STATE_PREFIX}{name}.{leaf.key}"
                entries[f"{key}@{offset}"] = ShardedTensor(
                    key=key,
                    data=_part_of(tensor, first, part.shape),
                    dtype=tensor.dtype,
                    local_shape=part.shape,
                    global_shape=leaf.global_shape,
                    global_offset=offset,
                    axis_fragmentations=None,
                    replica_id=_without_data_replica(leaf.replica_id),
                )
    return entries


def _part_of(state: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    if state.dim() == 1:
        return state[first : first + math.prod(shape)].view(shape)
    assert first == 0
    assert state.shape == shape
    return state


def row_entries(leaf: ShardedTensor, start: int, name: str, rows: Tensor) -> dict[str, ShardedTensor]:
    """Checkpoint entries for one rank's range of a table's state per row.

    The rank that owns a row's first element, in the table's first columns, is the one whose copy counts.

    Args:
        leaf: the rank's part of the table in the model's checkpoint, [rows, columns].
        start: first position of the range in the flattened part.
        name: name of the state.
        rows: [n], a number for every row that the range has elements of; the entries are views of it.

    Returns:
        Shards of a tensor named `optimizer.state.<name>.<table's global name>`, with the shape [all rows].
    """
    (num_rows, _), (first_row, first_column) = leaf.global_shape, leaf.global_offset
    row, within = divmod(start, leaf.local_shape[1])
    *copies, _ = _without_data_replica(leaf.replica_id)
    key = f"{STATE_PREFIX}{name}.{leaf.key}"
    # The first row may have begun in another rank's range.
    ends = (0, 1, rows.numel()) if within else (0, rows.numel())
    entries = {}
    for low, high in pairwise(ends):
        if low < high:
            offset = (first_row + row + low,)
            is_copy = first_column > 0 or (low == 0 and within > 0)
            entries[f"{key}@{offset}"] = ShardedTensor(
                key=key,
                data=rows[low:high],
                dtype=rows.dtype,
                local_shape=(high - low,),
                global_shape=(num_rows,),
                global_offset=offset,
                axis_fragmentations=None,
                replica_id=(*copies, int(is_copy)),
            )
    return entries


def number_entry(leaf: ShardedTensor, name: str, number: Tensor) -> dict[str, ShardedTensor]:
    """Checkpoint entry for a number that all parts of a table share.

    The part with the table's first row and column is the one whose copy counts.

    Args:
        leaf: the rank's part of the table in the model's checkpoint, [rows, columns].
        name: name of the number.
        number: [1]; the entry is a view of it.
    """
    *copies, _ = _without_data_replica(leaf.replica_id)
    key = f"{STATE_PREFIX}{name}.{leaf.key}"
    return {
        key: ShardedTensor(
            key=key,
            data=number,
            dtype=number.dtype,
            local_shape=(1,),
            global_shape=(1,),
            global_offset=(0,),
            axis_fragmentations=None,
            replica_id=(*copies, int(any(leaf.global_offset))),
        )
    }


def _without_data_replica(replica_id: int | tuple[int, ...]) -> tuple[int, ...]:
    """Copies over pipeline and tensor ranks remain copies; data-parallel ranks each hold another part."""
    assert isinstance(replica_id, tuple)
    return (*replica_id[:-1], 0)
