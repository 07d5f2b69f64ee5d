"""Save and restore a run: weights, optimizer state, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from megamem.model import MemoryGPTModel
from megamem.shards import walk_shards
from megamem.trained_part import TrainedPart
from pretrain.checkpoint import folder as folders
from pretrain.checkpoint.derived import MAIN_PREFIX, derived_weights, main_name
from pretrain.checkpoint.index import Index
from pretrain.checkpoint.loading import Target, load
from pretrain.checkpoint.store.tensors import Region
from pretrain.checkpoint.write_plan import region_of
from pretrain.config.schema import RunConfig
from pretrain.config.updates import ADAMW, MUON, ROW_WISE, STATE_PREFIX
from pretrain.engine.build import unwrap
from pretrain.engine.optimizer import MemoryOptimizer
from pretrain.engine.weight_gathering import complete_weights, start_gathering
from pretrain.errors import CheckpointError
from pretrain.state import RunState, TrainedLayers


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
    trained_layers: TrainedLayers = None,
    with_moments: bool = True,
) -> RunState:
    """Load weights and optimizer state in place, whatever layout wrote them. Collective.

    The weights come from the main weights, each rank's share of them, and are gathered as after an update. Where a
    checkpoint has weights and no main weights, because it holds weights alone or they were not trained, the weights are
    the main weights, the moments start at zero, and their updates are counted anew. Without `with_moments` all moments
    start at zero. Where another update of tables wrote it, their moments are made of what there is.

    Args:
        trained_layers: the run's `optimizer.trained_layers`, by which the chunks were built.

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
        state = [shard for shard in state if shard.key.startswith(MAIN_PREFIX)]
    for shard in state:
        if not shard.key.startswith(MAIN_PREFIX):
            # Those that a checkpoint of another update does not have start at zero.
            shard.data.zero_()
    stale: list[_Stale] = []

    def moments_of_rows(index: Index) -> Iterator[Target]:
        for moments, last_updates in _stale_moments(state, index):
            stale.append(moments)
            yield last_updates

    load(
        saved.path,
        lambda index: [
            *_weight_targets(untrained, index, saved.weights_dtype),
            *_state_targets(state, index),
            *moments_of_rows(index),
        ],
    )
    run = saved.run.training(trained_layers)
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
    model = chunks[0].model_config

    def updates_of(parameter: nn.Parameter) -> int:
        return run.updates_of(lambda layers: TrainedPart.of(model, layers).trains(served[parameter]))

    return updates_of


def _state_targets(shards: Sequence[ShardedTensor], index: Index) -> Iterator[Target]:
    """Targets of main weights and moments. Where the weights were not trained, they are the main weights."""
    for shard in shards:
        weight = shard.key.removeprefix(STATE_PREFIX).partition(".")[2]
        if weight not in index.tensors or main_name(weight) in index.tensors:
            _check_matrices(shard, weight, index)
            yield from _of_other_update(shard, weight, index) if shard.key not in index.tensors else [_target(shard)]
        elif shard.key == main_name(weight):
            yield _target(shard, weight)


def _check_matrices(shard: ShardedTensor, weight: str, index: Index) -> None:
    """Refuse a checkpoint in which another update than the run's kept the state of a hidden matrix.

    Neither's state can be made of the other's: momentum has another decay, and no second moment.
    """
    for ours, theirs in ((ADAMW, MUON), (MUON, ADAMW)):
        own, others = ([f"{STATE_PREFIX}{name}.{weight}" for name in update.per_element] for update in (ours, theirs))
        if shard.key in own and shard.key not in index.tensors and all(name in index.tensors for name in others):
            raise CheckpointError(
                f"the checkpoint has the state of {weight} as optimizer.matrices: {theirs.name} keeps it "
                f"({', '.join(theirs.per_element)}), and optimizer.matrices is {ours.name}: set it to {theirs.name}, or "
                f"change it where a stage begins with optimizer_state: reset"
            )


def _of_other_update(shard: ShardedTensor, weight: str, index: Index) -> Iterator[Target]:
    """Targets of a table's moments that a checkpoint has none of, by those that its other update kept.

    The mean over a row of AdamW's second moments is the row's, to rounding: both are averages over the same steps. The
    other way each element gets its row's; first moments have nothing to come from, and stay at zero.
    """
    names = (*ADAMW.per_element, *ROW_WISE.per_row)
    first, of_elements, of_rows, last_updates = (f"{STATE_PREFIX}{name}.{weight}" for name in names)
    if shard.key == last_updates:
        # The rule of the tables takes them to be as of now.
        return
    if shard.key == of_rows and of_elements in index.tensors:
        num_rows, columns = shard.global_shape[0], index.tensors[of_elements].shape[1]
        region = Region(of_elements, (shard.global_offset[0], 0), (shard.local_shape[0], columns))
        yield Target(region, (num_rows, columns), shard.data, rows="mean")
    elif shard.key == of_elements and of_rows in index.tensors:
        whole = region_of(shard)
        region = Region(of_rows, whole.offset[:1], whole.shape[:1])
        yield Target(region, tuple(shard.global_shape[:1]), shard.data.detach().view(whole.shape), rows="spread")
    elif shard.key != first or of_rows not in index.tensors:
        # Its absence is an error.
        yield _target(shard)


@dataclass(frozen=True)
class _Stale:
    """Second moments of elements that were made of their rows', which are as of each row's last update.

    Attributes:
        weight: name of the table.
        moments: [n, columns].
        last_updates: [n].
    """

    weight: str
    moments: Tensor
    last_updates: Tensor

    def bring_up(self, num_updates: int, beta2: float) -> None:
        """Have them be as of an update."""
        elapsed = (num_updates - self.last_updates).double()
        self.moments.mul_(torch.pow(beta2, elapsed).float().unsqueeze(1))


def _stale_moments(shards: Sequence[ShardedTensor], index: Index) -> Iterator[tuple[_Stale, Target]]:
    """Moments of elements that come from rows, and targets of the rows' last updates."""
    *_, name = ROW_WISE.per_row
    prefix = f"{STATE_PREFIX}{ADAMW.per_element[-1]}."
    for shard in shards:
        weight = shard.key.removeprefix(prefix)
        last_updates = f"{STATE_PREFIX}{name}.{weight}"
        if shard.key.startswith(prefix) and shard.key not in index.tensors and last_updates in index.tensors:
            whole = region_of(shard)
            stale = _Stale(weight, shard.data.detach().view(whole.shape), shard.data.new_zeros(whole.shape[0]))
            region = Region(last_updates, whole.offset[:1], whole.shape[:1])
            yield stale, Target(region, tuple(shard.global_shape[:1]), stale.last_updates)


def load_weights(path: Path, chunks: Sequence[MemoryGPTModel]) -> None:
    """Load the weights alone into bare chunks. Collective.

    Those that are not stored are cast from the main weights, item by item; no moments are read.

    Raises:
        CheckpointError: on every rank: the checkpoint cannot be read, or is of another model.
    """
    shards = [shard for _, shard in walk_shards(_model_entries(chunks))]
    name_of_dtype = folders.read_state(path).weights_dtype
    load(path, lambda index: list(_weight_targets(shards, index, name_of_dtype)))
    for chunk in chunks:
        chunk.weights_are_set = True


def _weight_targets(shards: Sequence[ShardedTensor], index: Index, name_of_dtype: str | None) -> Iterator[Target]:
    derived = derived_weights(index.tensors)
    for shard in shards:
        if shard.key in derived:
            yield _target(shard, derived[shard.key], None if name_of_dtype is None else getattr(torch, name_of_dtype))
        else:
            yield _target(shard)


def _target(shard: ShardedTensor, name: str | None = None, rounded_to: torch.dtype | None = None) -> Target:
    region = region_of(shard)
    if name is not None:
        region = type(region)(name, region.offset, region.shape)
    return Target(region, tuple(shard.global_shape), shard.data.detach().view(region.shape), rounded_to)


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
