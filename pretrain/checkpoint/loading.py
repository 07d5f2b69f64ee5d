"""Reading a checkpoint into the tensors of a model and its optimizer, on any layout.

Every rank reads its own regions of the items, and no more, and copies them in place. It holds one of them per thread
besides what it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from pretrain.checkpoint.index import Index, StoredItem
from pretrain.checkpoint.safe_metadata import check_small_files
from pretrain.checkpoint.store.lazy_tensor import LazyTensor
from pretrain.checkpoint.store.selected import times
from pretrain.checkpoint.store.tensors import Region, overlap, slices_in
from pretrain.checkpoint.store.torch_dist import TorchDistReader
from pretrain.checkpoint.write_plan import region_of
from pretrain.errors import CheckpointError

_READING_THREADS = 2


@dataclass(frozen=True)
class LoadTarget:
    """Destination of a region of a stored tensor.

    Attributes:
        region: rectangle of the stored tensor.
        global_shape: shape that the stored tensor has to have.
        data: tensor in the region's shape, of any dtype, filled in place.
        rounded_to: a dtype that every element is cast to on its way; None: straight to that of `data`.
        rows: a region with a number per row fills `data` [rows, columns] by "spread"ing each over its row; one
            [rows, columns] fills `data` [rows] by the "mean" of each row, all of whose columns it has.
        factor: number that every element is multiplied by on its way, before it is rounded; None: none.
    """

    region: Region
    global_shape: tuple[int, ...]
    data: Tensor
    rounded_to: torch.dtype | None = None
    rows: Literal["spread", "mean"] | None = None
    factor: float | None = None


def target_of(
    shard: ShardedTensor,
    name: str | None = None,
    rounded_to: torch.dtype | None = None,
    factor: float | None = None,
) -> LoadTarget:
    """Target that fills a shard of a model or an optimizer in place.

    Args:
        name: name of the stored tensor; None: that of the shard.
        rounded_to, factor: casts and factors of `LoadTarget`.
    """
    region = region_of(shard)
    if name is not None:
        region = Region(name, region.offset, region.shape)
    return LoadTarget(
        region, tuple(shard.global_shape), shard.data.detach().view(region.shape), rounded_to, factor=factor
    )


def load(folder: Path, targets_of: Callable[[Index], Sequence[LoadTarget]]) -> None:
    """Fill this rank's targets from the checkpoint in a folder. Collective.

    Args:
        folder: the checkpoint's folder.
        targets_of: the targets, given the checkpoint's index.

    Raises:
        CheckpointError: on every rank: the checkpoint is damaged, lacks a tensor or a part of it, or has it in another
            shape. Nothing was filled, unless a file could not be read.
    """
    index, targets = None, None
    refusal = None
    try:
        index = check_small_files(folder)
        targets = targets_of(index)
    except CheckpointError as error:
        refusal = str(error)
    _agree(refusal)
    assert index is not None
    assert targets is not None
    shortfall = next((text for target in targets if (text := _shortfall(target, index))), None)
    _agree(
        shortfall and f"the checkpoint {folder} does not hold what this model needs: {shortfall}. {_remedy(shortfall)}"
    )
    problem = _fill(folder, index, targets)
    _agree(problem and f"the checkpoint {folder} cannot be read: {problem}. Remove it to use an earlier one")


def _remedy(shortfall: str) -> str:
    """Advice on a checkpoint that does not fit the model. Another shape follows from the model's keys or the data."""
    if " has the shape " in shortfall:
        return (
            "Shapes follow from the model's keys and from the vocabulary of the data's tokenizer: use those that it was "
            "trained with"
        )
    return "Use the version of the package that wrote it, or remove it to use an earlier one"


def _agree(problem: str | None) -> None:
    """Raise, on every rank, the first problem that any rank has."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if found := next((text for text in problems if text), None):
        raise CheckpointError(found)


def _shortfall(target: LoadTarget, index: Index) -> str | None:
    """Missing parts of a target, in words; None if the checkpoint has all of it. Stored parts do not overlap."""
    name = target.region.name
    if name not in index.tensors:
        return f"it has no tensor {name}"
    shape = index.tensors[name].shape
    if shape != target.global_shape:
        return f"its {name} has the shape {shape}, and not {target.global_shape}"
    parts = (overlap(target.region, item.region) for item in index.items[name])
    missing = target.region.numel - sum(part.numel for part in parts if part is not None)
    return f"{missing} elements of {name} are missing" if missing > 0 else None


def _fill(folder: Path, index: Index, targets: Sequence[LoadTarget]) -> str | None:
    """Read every item that a target has a part of. Returns the error in words; None if there is none."""
    uses: dict[StoredItem, list[LoadTarget]] = {}
    for target in targets:
        for item in index.items[target.region.name]:
            if overlap(target.region, item.region) is not None:
                uses.setdefault(item, []).append(target)
    by_file: dict[str, list[StoredItem]] = {}
    for item in sorted(uses, key=lambda item: (item.file, item.start)):
        by_file.setdefault(item.file, []).append(item)

    reader = TorchDistReader(folder, index)
    for target in targets:
        if target.rows == "mean":
            target.data.zero_()

    def read(file: str, *, means: bool = False) -> None:
        for item in by_file[file]:
            if parts := [target for target in uses[item] if (target.rows == "mean") == means]:
                stored = reader.item(item)
                for target in parts:
                    _copy(stored, item.region, target)

    with ThreadPoolExecutor(_READING_THREADS) as threads:
        futures = {file: threads.submit(read, file) for file in by_file}
        for file, future in futures.items():
            error = future.exception()
            if isinstance(error, CheckpointError):
                cause = error.__cause__
                return f"{file} ({cause.strerror if isinstance(cause, OSError) else 'damaged contents'})"
            if error is not None:
                raise error
    # In the order of the files, not of threads: parts of a row's mean are added up.
    for file in by_file:
        read(file, means=True)
    return None


def _copy(stored: LazyTensor, region: Region, target: LoadTarget) -> None:
    common = overlap(region, target.region)
    assert common is not None
    source = stored.read(tuple(part.start for part in slices_in(common, region)), common.shape)
    if target.factor is not None:
        source = times(source, target.factor)
    if target.rounded_to is not None:
        source = source.to(target.rounded_to)
    place = target.data[slices_in(common, target.region)[: target.data.dim()]]
    if target.rows == "mean":
        place += source.to(place).sum(1) / target.region.shape[1]
    elif target.rows == "spread":
        place.copy_(source.unsqueeze(1).expand_as(place))
    else:
        place.copy_(source)
