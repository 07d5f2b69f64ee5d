"""Tensors in memory as a checkpoint that can be read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pretrain.checkpoint.store.tensors import Region, TensorInfo


class InMemory:
    """A `TensorReader` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.held = tensors

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(each.shape), each.dtype) for name, each in self.held.items()}

    def read(self, region: Region) -> Tensor:
        return part_of(self.held[region.name], region).clone()


def part_of(tensor: Tensor, region: Region) -> Tensor:
    """A region of a tensor, as a view of it."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(region.offset, region.shape, strict=True))]
