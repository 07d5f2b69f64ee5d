"""Save and restore a run: weights, optimizer state, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from megamem.model import MemoryGPTModel
from megamem.parameters.shards import walk_shards
from megamem.parameters.trained_part import ALL, Trained, TrainedPart
from pretrain.checkpoint import folder as folders
from pretrain.checkpoint.derived import SCALE_PREFIX, derived_weights, is_moment, main_name, scales_in
from pretrain.checkpoint.index import Index
from pretrain.checkpoint.loading import LoadTarget, load, target_of
from pretrain.checkpoint.other_updates import StaleMoments, check_matrices, of_other_update, stale_moments
from pretrain.checkpoint.store.torch_dist import TorchDistReader
from pretrain.config.schema import RunConfig
from pretrain.config.updates import STATE_PREFIX
from pretrain.engine.chunks import unwrap
from pretrain.engine.optimizer import MemoryOptimizer
from pretrain.engine.weight_gathering import complete_weights, start_gathering
from pretrain.state import RunState


def entries_to_save(
    config: RunConfig, chunks: Sequence[DistributedDataParallel], optimizer: MemoryOptimizer
) -> dict[str, Any]:
    """Sharded state dict of the contents of a checkpoint of this run.

    Without `checkpoint.weights_copy` it has the optimizer's state, and those tensors of the model that the main weights
    do not determine.
    """
    model = _model_entries([unwrap(chunk) for chunk in chunks])
    state = optimizer.sharded_state_dict(model)
    if config.checkpoint.weights_copy:
        return {"model": model, "optimizer": state}
    kept = [shard for tensor, shard in walk_shards(model) if not is_trained(tensor)]
    return {"model": kept, "optimizer": state}


def is_trained(tensor: Tensor) -> bool:
    """True if a model's tensor has fp32 main weights: `pretrain.engine.optimizer` steps all parameters that require
    gradients, and those outside of `optimizer.trained_layers` do not."""
    return tensor.requires_grad


def restore_run(
    saved: folders.SavedState,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MemoryOptimizer,
    *,
    trained: Trained = ALL,
    tables_every: int = 1,
    with_moments: bool = True,
) -> RunState:
    """Load weights and optimizer state in place, whatever layout wrote them. Collective.

    The weights come from the main weights, each rank's share of them, and are gathered as after an update. Where a
    checkpoint has weights and no main weights, because it holds weights alone or they were not trained, the weights are
    the main weights, the moments start at zero, and their updates are counted anew. Without `with_moments` all moments
    start at zero. Where another update of tables wrote it, their moments are made of what there is.

    Args:
        trained: the part that the run trains, by which the chunks were built.
        tables_every: updates of the run per update of its tables, from now on.

    Returns:
        The counters to go on with.

    Raises:
        CheckpointError: on every rank: the checkpoint cannot be read, is of another model, or has the state of another
            `optimizer.matrices`.
    """
    bare = [unwrap(chunk) for chunk in chunks]
    model = _model_entries(bare)
    untrained = [shard for tensor, shard in walk_shards(model) if not is_trained(tensor)]
    state = [shard for _, shard in walk_shards(optimizer.sharded_state_dict(model))]
    if not with_moments:
        state = [shard for shard in state if not is_moment(shard.key)]
    for shard in state:
        # Those that a checkpoint of another update does not have start at zero, and scales at one.
        if is_moment(shard.key):
            shard.data.zero_()
        elif shard.key.startswith(SCALE_PREFIX):
            shard.data.fill_(1)
    stale: list[StaleMoments] = []

    def moments_of_rows(index: Index) -> Iterator[LoadTarget]:
        for moments, last_updates in stale_moments(state, index):
            stale.append(moments)
            yield last_updates

    def targets_of(index: Index) -> list[LoadTarget]:
        scales = _scales(saved.path, index)
        return [
            *_weight_targets(untrained, index, saved.weights_dtype, scales),
            *_state_targets(state, index, scales),
            *moments_of_rows(index),
        ]

    load(saved.path, targets_of)
    run = saved.run.training(trained).updating_tables(tables_every)
    if not with_moments:
        run = run.without_moments()
    updates_of = _updates_of(run, bare)
    optimizer.set_num_updates(updates_of)
    parameters = {shard.key: tensor for tensor, shard in walk_shards(model) if isinstance(tensor, nn.Parameter)}
    for moments in stale:
        betas = next(group["betas"] for group in optimizer.param_groups if "betas" in group)
        moments.bring_up(updates_of(parameters[moments.weight]), betas[1])
    optimizer.set_weights_from_main()
    start_gathering(chunks)
    complete_weights(chunks)
    for chunk in bare:
        chunk.weights_are_set = True
    return run


def _updates_of(run: RunState, chunks: Sequence[MemoryGPTModel]) -> Callable[[nn.Parameter], int]:
    """Number of updates that the moments of a parameter have seen."""
    served = {parameter: blocks for chunk in chunks for parameter, blocks in chunk.blocks_served().items()}
    tables, model = frozenset().union(*(chunk.tables for chunk in chunks)), chunks[0].model_config

    def updates_of(parameter: nn.Parameter) -> int:
        is_table = parameter in tables
        return run.updates_of(
            lambda part: TrainedPart.of(model, part).trains(served[parameter], is_table=is_table), is_table=is_table
        )

    return updates_of


def _state_targets(shards: Sequence[ShardedTensor], index: Index, scales: Mapping[str, float]) -> Iterator[LoadTarget]:
    """Targets of main weights, moments and scales. Where the weights were not trained, they are the main weights.

    Args:
        scales: scales in the checkpoint (`scales_in`). Main weights that have one here take what is stored and the
            scale.
    """
    scaled_here = {shard.key.removeprefix(SCALE_PREFIX) for shard in shards if shard.key.startswith(SCALE_PREFIX)}
    for shard in shards:
        weight = shard.key.removeprefix(STATE_PREFIX).partition(".")[2]
        is_main = shard.key == main_name(weight)
        factor = scales.get(weight) if is_main and weight not in scaled_here else None
        if shard.key.startswith(SCALE_PREFIX):
            yield from [target_of(shard)] if shard.key in index.tensors else []
        elif weight not in index.tensors or main_name(weight) in index.tensors:
            check_matrices(shard, weight, index)
            if shard.key in index.tensors:
                yield target_of(shard, factor=factor)
            else:
                yield from of_other_update(shard, weight, index)
        elif is_main:
            yield target_of(shard, weight, factor=factor)


def load_weights(path: Path, chunks: Sequence[MemoryGPTModel]) -> None:
    """Load the weights alone into bare chunks. Collective.

    Those that are not stored are cast from the main weights, item by item; no moments are read.

    Raises:
        CheckpointError: on every rank: the checkpoint cannot be read, or is of another model.
    """
    shards = [shard for _, shard in walk_shards(_model_entries(chunks))]
    name_of_dtype = folders.read_state(path).weights_dtype

    def targets_of(index: Index) -> list[LoadTarget]:
        return [*_weight_targets(shards, index, name_of_dtype, _scales(path, index))]

    load(path, targets_of)
    for chunk in chunks:
        chunk.weights_are_set = True


def _scales(path: Path, index: Index) -> dict[str, float]:
    """See `scales_in`, of the checkpoint in a folder."""
    if not any(name.startswith(SCALE_PREFIX) for name in index.tensors):
        return {}
    return scales_in(TorchDistReader(path, index))


def _weight_targets(
    shards: Sequence[ShardedTensor], index: Index, name_of_dtype: str | None, scales: Mapping[str, float]
) -> Iterator[LoadTarget]:
    derived = derived_weights(index.tensors)
    for shard in shards:
        factor = scales.get(shard.key)
        if shard.key in derived:
            rounded_to = None if name_of_dtype is None else getattr(torch, name_of_dtype)
            yield target_of(shard, derived[shard.key], rounded_to, factor)
        else:
            yield target_of(shard, factor=factor)


def _model_entries(chunks: Sequence[MemoryGPTModel]) -> dict[str, Any]:
    """The chunks' sharded tensors, by chunk. They are views of the chunks' own, so that loading fills them in place.

    Megatron's pickled extra states are left out: local layers have none, and reading one would run pickled code.
    """
    entries = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}
    _, tensors = extract_matching_values(entries, lambda entry: isinstance(entry, ShardedObject))
    mine = {
        tensor.untyped_storage().data_ptr() for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())
    }
    for _, shard in walk_shards(tensors):
        assert shard.data.untyped_storage().data_ptr() in mine, (
            f"{shard.key} is no part of a chunk: it cannot be loaded"
        )
    return tensors
