"""Memory layers as modules of public codes, both ways: of a model's checkpoint they alone are read and written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.families.registry import family_of
from megamem.placement.placed import PlacedMemory
from megamem.releases.release import ReleasedModule
from pretrain.checkpoint.store.paired import PairedReader, shapes_of
from pretrain.checkpoint.store.tensors import Pair, Region, TensorInfo, TensorReader, inverted
from pretrain.errors import CheckpointError, ConfigError


def are_modules(model: ModelConfig) -> bool:
    """Tell whether public codes have the model's memories as modules."""
    return model.memory is not None and family_of(model.memory).released_module is not None


def modules_as_ours(source: TensorReader, model: ModelConfig) -> TensorReader:
    """Modules of a checkpoint under our names, with buffers that the code has in no checkpoint.

    Args:
        source: tensors by their names.
        model: config of a model with these memories.

    Raises:
        CheckpointError: the checkpoint lacks a module of the model, or has one of other sizes or with other parts.
        ConfigError: the code has no such memories.
    """
    pairs: list[Pair] = []
    more: dict[str, float] = {}
    implied: dict[str, Tensor] = {}
    for layer in model.memory_layers:
        module = _module(layer, model)
        prefix = _prefix(source, layer, module)
        own = [*_parts(layer, module, prefix), *_table_in_parts(source, layer, module, prefix)]
        _check(source, own, module, prefix, model)
        pairs += own
        more |= {f"{prefix}{part.name}": part.less for parts in module.parts.values() for part in parts}
        try:
            implied |= {f"{layer.name}.{name}": tensor for name, tensor in module.implied().items()}
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return _Adjusted(PairedReader(pairs, _Adjusted(source, more, {})), {}, implied)


def modules_as_released(ours: TensorReader, model: ModelConfig) -> TensorReader:
    """Memories of ours as modules.

    Raises:
        CheckpointError: the checkpoint lacks a tensor.
        ConfigError: the code has no such memories.
    """
    pairs: list[Pair] = []
    less: dict[str, float] = {}
    stated: dict[str, Tensor] = {}
    for layer in model.memory_layers:
        module = _module(layer, model)
        prefix = f"model.{module.names[0]}."
        table = (module.table_rows, layer.memory.row_width)
        pairs += _parts(layer, module, prefix)
        pairs.append(Pair(_whole(_table_name(layer), table), _whole(f"{prefix}{module.table}.weight", table)))
        less |= {f"{prefix}{part.name}": -part.less for parts in module.parts.values() for part in parts}
        stated |= {f"{prefix}{name}": torch.tensor(numbers) for name, numbers in module.stated.items()}
    return _Adjusted(PairedReader(inverted(pairs), ours), less, stated)


class _Adjusted:
    """A checkpoint with a number added to some tensors, which then are at least fp32, and with more tensors."""

    def __init__(self, source: TensorReader, added: Mapping[str, float], more: Mapping[str, Tensor]) -> None:
        self._source, self._more = source, more
        self._added = {name: number for name, number in added.items() if number}
        self._tensors = dict(source.tensors)
        for name in self._added:
            info = self._tensors[name]
            self._tensors[name] = TensorInfo(info.shape, torch.promote_types(info.dtype, torch.float32))
        for name, tensor in more.items():
            self._tensors[name] = TensorInfo(tuple(tensor.shape), tensor.dtype)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorReader`."""
        return self._tensors

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        if (tensor := self._more.get(region.name)) is not None:
            return tensor[tuple(slice(a, a + n) for a, n in zip(region.offset, region.shape, strict=True))].clone()
        read = self._source.read(region)
        if (number := self._added.get(region.name)) is None:
            return read
        return read.to(self._tensors[region.name].dtype).add_(number)


def _module(layer: PlacedMemory, model: ModelConfig) -> ReleasedModule:
    make = family_of(layer.memory).released_module
    assert make is not None
    try:
        return make(layer, model)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _table_name(layer: PlacedMemory) -> str:
    (table,) = layer.memory.tables
    return f"banks.{layer.view.bank}.{table.name}"


def _whole(name: str, shape: tuple[int, ...]) -> Region:
    return _rows(name, 0, shape)


def _rows(name: str, first: int, shape: tuple[int, ...]) -> Region:
    return Region(name, (first, *(0,) * (len(shape) - 1)), shape)


def _parts(layer: PlacedMemory, module: ReleasedModule, prefix: str) -> Iterator[Pair]:
    """All but the table."""
    for name, parts in module.parts.items():
        first = 0
        for part in parts:
            ours = _rows(f"{layer.name}.{name}", first, part.shape)
            yield Pair(ours, _rows(f"{prefix}{part.name}", part.first, part.there or part.shape))
            first += part.shape[0]


def _prefix(source: TensorReader, layer: PlacedMemory, module: ReleasedModule) -> str:
    """Beginning of the names of a layer's module, in a model that may have a name of its own for it."""
    wanted = re.compile(rf"((?:.*\.)?(?:{'|'.join(map(re.escape, module.names))})\.).+")
    found = {match[1] for name in source.tensors if (match := wanted.fullmatch(name)) is not None}
    if len(found) != 1:
        raise CheckpointError(
            f"the checkpoint has {len(found)} modules {' or '.join(module.names)}, and the model has one memory in block "
            f"{layer.span.read}: name the checkpoint's blocks in model.memory.placement.blocks"
        )
    return found.pop()


def _table_in_parts(source: TensorReader, layer: PlacedMemory, module: ReleasedModule, prefix: str) -> Iterator[Pair]:
    """The table as it lies in one tensor, or in parts of rows.

    Raises:
        CheckpointError: the table has another number of rows than the bank.
    """
    start, rows = f"{prefix}{module.table}.", layer.view.num_bank_rows
    names = [f"{start}weight"]
    if names[0] not in source.tensors:
        numbered = [name for name in source.tensors if re.fullmatch(rf"{re.escape(start)}shard_\d+\.weight", name)]
        names = [f"{start}shard_{number}.weight" for number in range(len(numbered))]
    parts = [info.shape[0] if (info := source.tensors.get(name)) is not None else 0 for name in names]
    if sum(parts) != rows:
        without = "" if module.table_rows == rows else ", and rows_multiple to 1, as it pads nothing"
        raise CheckpointError(
            f"{start}weight has {sum(parts):,} rows, in one part or several, and the memory of block {layer.span.read} "
            f"{rows:,}: set the keys of model.memory that give its rows as they were{without}"
        )
    first = 0
    for name, part in zip(names, parts, strict=True):
        shape = (part, layer.memory.row_width)
        yield Pair(_rows(_table_name(layer), first, shape), _whole(name, shape))
        first += part


def _check(
    source: TensorReader, pairs: Sequence[Pair], module: ReleasedModule, prefix: str, model: ModelConfig
) -> None:
    """Refuse a module that lacks a tensor, has other shapes or stated numbers, or more tensors."""
    streams = (
        "one residual stream (model.residual_streams is null)"
        if model.num_streams is None
        else f"as many residual streams as model.residual_streams.count is, {model.num_streams}"
    )
    shapes = shapes_of(pair.theirs for pair in pairs)
    for name, shape in shapes.items():
        info = source.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{name} is missing from a module that reads {streams}")
        if info.shape != shape:
            raise CheckpointError(
                f"{name} has shape {list(info.shape)}, but {list(shape)} in a module that reads {streams}: set the "
                "keys of the model as they were"
            )
    for name, numbers in module.stated.items():
        info = source.tensors.get(f"{prefix}{name}")
        if info is not None and source.read(info.whole(f"{prefix}{name}")).tolist() != list(numbers):
            raise CheckpointError(
                f"{prefix}{name} is not {list(numbers)}, as the keys of model.memory have it: set them as they were"
            )
    known = shapes.keys() | {f"{prefix}{name}" for name in module.stated}
    if other := sorted(name for name in source.tensors if name.startswith(prefix) and name not in known):
        raise CheckpointError(
            f"{other[0]} is in no module that reads {streams}, as the memory of the configuration does"
        )
