"""Sharded tensors through Megatron's `dist_checkpointing`, with failures as errors on every rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megamem.shards import walk_shards
from pretrain.checkpoint.safe_metadata import check_small_files
from pretrain.errors import CheckpointError


class InProcessSaveStrategy(SaveShardedStrategy):
    """Megatron's `torch_dist` format, written by the ranks themselves through PyTorch's own writer.

    Megatron forks writer processes and waits for each to report; one that is killed (out of memory, say) never does,
    and the save hangs. A rank that writes its own file either finishes, or has all ranks raise, or is itself gone,
    which ends the run.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write the main replica of every shard; one file per rank, synced to disk."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


def save_tensors(entries: ShardedStateDict, folder: Path) -> None:
    """Write all ranks' shards into a folder that exists and is empty. Collective.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
    """
    tensors = _without_objects(entries)
    try:
        dist_checkpointing.save(tensors, str(folder), sharded_strategy=InProcessSaveStrategy("torch_dist", 1))
    except (OSError, RuntimeError, CheckpointException, CheckpointingException) as error:
        if isinstance(error, RuntimeError) and not _is_stream_failure(error):
            raise
        raise CheckpointError(
            f"the checkpoint cannot be written to {folder}: {_reason(error)}. "
            "Free some space or choose another --run-dir; earlier checkpoints are intact"
        ) from error


def _is_stream_failure(error: RuntimeError) -> bool:
    """Whether PyTorch's file writer failed, which raises no OSError; others are lost connections or defects."""
    return any(phrase in str(error) for phrase in ("iostream error", "PytorchStreamWriter"))


def load_tensors(entries: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """Read every shard that `entries` asks for, whole. Collective.

    Raises:
        CheckpointError: the checkpoint is damaged, lacks an entry or a part of it, or has it in another shape.
    """
    check_small_files(folder)
    tensors = _without_objects(entries)
    _check_coverage(tensors, folder)
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(tensors, str(folder))
    except (
        OSError,
        RuntimeError,
        KeyError,
        ValueError,
        EOFError,
        CheckpointException,
        CheckpointingException,
    ) as error:
        raise CheckpointError(
            f"the checkpoint {folder} cannot be read: {_reason(error)}. Remove it to use an earlier one"
        ) from error
    return loaded


def _check_coverage(tensors: ShardedStateDict, folder: Path) -> None:
    """Refuse, on every rank, a checkpoint that lacks an element of any rank's shards: PyTorch would skip it."""
    stored = torch_checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    problem = next(
        (text for _, shard in walk_shards(tensors) if (text := _shortfall(shard, stored.get(shard.key)))), None
    )
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if found := next((text for text in problems if text is not None), None):
        raise CheckpointError(
            f"the checkpoint {folder} does not hold what this model needs: {found}. "
            "Use the version of the package that wrote it, or remove it to use an earlier one"
        )


def _shortfall(shard: ShardedTensor, stored: Any) -> str | None:
    """What a checkpoint lacks of a shard, in words; None if it has all of it. Stored parts do not overlap."""
    if not isinstance(stored, TensorStorageMetadata):
        return f"it has no tensor {shard.key}"
    if tuple(stored.size) != tuple(shard.global_shape):
        return f"its {shard.key} has the shape {tuple(stored.size)}, and not {tuple(shard.global_shape)}"
    # Along a prepended axis, a shard is one element long.
    wanted = list(zip(shard.global_offset, (1,) * shard.prepend_axis_num + tuple(shard.local_shape), strict=True))
    found = 0
    for part in stored.chunks:
        overlaps = (
            min(start + size, part_start + part_size) - max(start, part_start)
            for (start, size), part_start, part_size in zip(wanted, part.offsets, part.sizes, strict=True)
        )
        found += math.prod(max(0, overlap) for overlap in overlaps)
    missing = math.prod(shard.local_shape) - found
    return f"{missing} elements of {shard.key} are missing" if missing > 0 else None


def _without_objects(entries: ShardedStateDict) -> ShardedStateDict:
    """Leave out Megatron's pickled extra states: local layers have none, and reading one would run pickled code."""
    _, tensors = extract_matching_values(entries, lambda entry: isinstance(entry, ShardedObject))
    return tensors


def _reason(error: BaseException) -> str:
    """The innermost message of a chain of wrapped errors."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_reason(cause)}"
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[-1]
