"""Map from each parameter of a chunk to its shard of a global tensor, by the model's own checkpoint entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


def walk_shards(entries: Any) -> Iterator[tuple[Tensor, ShardedTensor]]:
    """Every shard of a `sharded_state_dict`, with the tensor of the chunk that it is (a view of).

    A tensor has several shards where a checkpoint knows its parts apart, as the gate and up halves of a SwiGLU's first
    linear.

    Args:
        entries: nested dictionaries and lists, as `sharded_state_dict` returns them.
    """
    if isinstance(entries, ShardedTensorFactory):
        whole = entries.data
        for _, shard in walk_shards(entries.build()):
            yield whole, shard
    elif isinstance(entries, ShardedTensor):
        yield entries.data, entries
    elif isinstance(entries, dict):
        for value in entries.values():
            yield from walk_shards(value)
    elif isinstance(entries, list | tuple):
        for value in entries:
            yield from walk_shards(value)
