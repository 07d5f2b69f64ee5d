"""The tensors of a grown model, read from those of the model that it is made of, or drawn. None is held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megamem.initialisation.distributions import Distribution
from megamem.initialisation.random_fill import fill
from pretrain.checkpoint.store.tensors import Region, TensorInfo, TensorReader
from pretrain.errors import CheckpointError


@dataclass(frozen=True)
class MeanOf:
    """The mean of tensors of the source, which are of one shape; of one tensor, itself."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Drawn:
    """A new tensor."""

    info: TensorInfo
    distribution: Distribution


@dataclass(frozen=True)
class Followed:
    """A new tensor that follows from others."""

    tensor: Tensor


Origin = MeanOf | Drawn | Followed


class GrownTensors:
    """A `TensorReader` of a grown model."""

    def __init__(self, source: TensorReader, origins: Mapping[str, Origin], seed: int) -> None:
        """
        Args:
            origins: origin of each tensor, by its name here.
            seed: seed that new ones are drawn with, as a run with it would.

        Raises:
            CheckpointError: the source lacks a tensor.
        """
        self._source, self._origins, self._seed = source, origins, seed
        self._tensors = {name: self._info(name, origin) for name, origin in origins.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorReader`."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        origin = self._origins.get(region.name)
        if origin is None:
            raise CheckpointError(f"there is no tensor {region.name} in the grown model")
        if isinstance(origin, Followed):
            part = tuple(slice(start, start + size) for start, size in zip(region.offset, region.shape, strict=True))
            return origin.tensor[part]
        if isinstance(origin, Drawn):
            drawn = torch.empty(region.shape, dtype=origin.info.dtype)
            shape, seed = origin.info.shape, self._seed
            fill(drawn, origin.distribution, seed=seed, name=region.name, global_shape=shape, offset=region.offset)
            return drawn
        parts = [self._source.read(Region(name, region.offset, region.shape)) for name in origin.names]
        if len(parts) == 1:
            return parts[0]
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        return torch.stack([part.to(wide) for part in parts]).mean(0).to(parts[0].dtype)

    def _info(self, name: str, origin: Origin) -> TensorInfo:
        if isinstance(origin, Drawn):
            return origin.info
        if isinstance(origin, Followed):
            return TensorInfo(tuple(origin.tensor.shape), origin.tensor.dtype)
        for source in origin.names:
            if source not in self._source.tensors:
                raise CheckpointError(f"{source} is missing, from which {name} is made")
        infos = {self._source.tensors[source] for source in origin.names}
        assert len(infos) == 1, f"{name} is the mean of tensors that differ: {infos}"
        return infos.pop()
