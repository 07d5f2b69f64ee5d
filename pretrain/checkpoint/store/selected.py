"""Some of a checkpoint's tensors, under other names or in another dtype, and several checkpoints as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pretrain.checkpoint.store.tensors import Region, TensorInfo, TensorReader, overlap, slices_in
from pretrain.errors import CheckpointError


def times(tensor: Tensor, factor: float) -> Tensor:
    """A tensor times a factor, in fp32 at least: rounding it to fewer bits is the reader's."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor


class Selected:
    """Some of a reader's tensors, under their names or others, in their dtype or another, and multiplied by a factor or not."""

    def __init__(
        self,
        source: TensorReader,
        names: Mapping[str, str],
        dtypes: Mapping[str, torch.dtype] | None = None,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        """Select tensors of a reader.

        Args:
            source: reader of the tensors.
            names: the name of each there, by its name here.
            dtypes: dtypes that differ from the source's, by the name here.
            factors: factors of the tensors that are multiplied, by the name here.
        """
        self._source, self._names, self._factors = source, names, factors or {}
        casts = dtypes or {}
        self._tensors = {
            name: TensorInfo(source.tensors[there].shape, casts.get(name, source.tensors[there].dtype))
            for name, there in names.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shapes and dtypes of the tensors, by name."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        if region.name not in self._names:
            raise CheckpointError(f"there is no tensor {region.name} in this checkpoint")
        there = Region(self._names[region.name], region.offset, region.shape)
        stored = self._source.read(there)
        if (factor := self._factors.get(region.name)) is not None:
            stored = times(stored, factor)
        return stored.to(self._tensors[region.name].dtype)


class Joined:
    """Tensors of two readers under their names; where both have a name, the first's."""

    def __init__(self, first: TensorReader, second: TensorReader, names: Iterable[str]) -> None:
        self._readers = {name: first if name in first.tensors else second for name in names}
        self._tensors = {name: reader.tensors[name] for name, reader in self._readers.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shapes and dtypes of the tensors, by name."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        if region.name not in self._readers:
            raise CheckpointError(f"there is no tensor {region.name} in this checkpoint")
        return self._readers[region.name].read(region)


class Padded:
    """A reader's tensors, some of them larger here, with zeros behind the stored elements."""

    def __init__(self, source: TensorReader, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Pad tensors of a reader.

        Args:
            shapes: shapes of the larger ones, by name.
        """
        self._source = source
        self._tensors = {
            name: TensorInfo(shapes.get(name, info.shape), info.dtype) for name, info in source.tensors.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shapes and dtypes of the tensors, by name."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        there = overlap(region, self._source.tensors[region.name].whole(region.name))
        if there == region:
            return self._source.read(region)
        result = torch.zeros(region.shape, dtype=self._tensors[region.name].dtype)
        if there is not None:
            result[slices_in(there, region)] = self._source.read(there)
        return result
