"""Writing and reading sharded tensors through Megatron's `dist_checkpointing`, with failures as errors on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException

from pretrain.checkpoint.safe_metadata import check_index
from pretrain.errors import CheckpointError


class InProcessSaveStrategy(SaveShardedStrategy):
    """Megatron's `torch_dist` format, written by the ranks themselves through PyTorch's own writer.

    Megatron forks writer processes and waits for each to report; one that is killed (out of memory, say) never does, and the save hangs. A rank
    that writes its own file either finishes, or has all ranks raise, or is itself gone, which ends the run.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

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

    def check_backend_compatibility(self, loaded_version: int) -> None:
        """Asked of loading strategies only."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Asked of loading strategies only."""


def save_tensors(entries: ShardedStateDict, folder: Path) -> None:
    """Write all ranks' shards into a folder that exists and is empty. Collective.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
    """
    tensors, _ = _without_objects(entries)
    try:
        dist_checkpointing.save(tensors, str(folder), sharded_strategy=InProcessSaveStrategy())
    except (OSError, RuntimeError, CheckpointException, CheckpointingException) as error:
        if isinstance(error, RuntimeError) and not _is_stream_failure(error):
            raise
        raise CheckpointError(
            f"the checkpoint cannot be written to {folder}: {_reason(error)}. Free some space or choose another --run-dir; earlier checkpoints are intact"
        ) from error


def _is_stream_failure(error: RuntimeError) -> bool:
    """Whether PyTorch's file writer in C++ failed, which knows no OSError; other RuntimeErrors are lost connections or defects."""
    return any(phrase in str(error) for phrase in ("iostream error", "PytorchStreamWriter"))


def load_tensors(entries: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """Read every shard that `entries` asks for. Collective.

    Raises:
        CheckpointError: the checkpoint is damaged, lacks an entry, or has it in another shape.
    """
    check_index(folder)
    tensors, _ = _without_objects(entries)
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


def _without_objects(entries: ShardedStateDict) -> tuple[ShardedStateDict, ShardedStateDict]:
    """Leave out Megatron's pickled extra states: local layers have none, and reading one would run pickled code."""
    objects, tensors = extract_matching_values(entries, lambda entry: isinstance(entry, ShardedObject))
    return tensors, objects


def _reason(error: BaseException) -> str:
    """The innermost message of a chain of wrapped errors."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_reason(cause)}"
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[-1]
