"""A checkpoint in memory: the tensors of a model that is on one rank, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamem.parameters.shards import walk_shards
from tests.in_memory import InMemory


def whole_tensors(model: Any) -> InMemory:
    """Tensors that a model on one rank would save, under the names that they would have."""
    held: dict[str, Tensor] = {}
    for _, shard in walk_shards(model.sharded_state_dict()):
        target = held.setdefault(shard.key, torch.zeros(shard.global_shape, dtype=shard.dtype))
        place = tuple(
            slice(start, start + size) for start, size in zip(shard.global_offset, shard.local_shape, strict=True)
        )
        target[place] = shard.data.detach()
    return InMemory(held)
