"""A checkpoint in memory: the tensors of a model that is on one rank, or any others, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamem.shards import walk_shards
from pretrain.checkpoint.store.tensors import Region, TensorInfo


@dataclass(frozen=True)
class WholeTensors:
    """A `TensorReader` of tensors that are there."""

    held: Mapping[str, Tensor]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self.held.items()}

    def read(self, region: Region) -> Tensor:
        part = tuple(slice(start, start + size) for start, size in zip(region.offset, region.shape, strict=True))
        return self.held[region.name][part].clone()


def whole_tensors(model: Any) -> WholeTensors:
    """Tensors that a model on one rank would save, under the names that they would have."""
    held: dict[str, Tensor] = {}
    for _, shard in walk_shards(model.sharded_state_dict()):
        target = held.setdefault(shard.key, torch.zeros(shard.global_shape, dtype=shard.dtype))
        place = tuple(
            slice(start, start + size) for start, size in zip(shard.global_offset, shard.local_shape, strict=True)
        )
        target[place] = shard.data.detach()
    return WholeTensors(held)
