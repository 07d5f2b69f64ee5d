"""Saving and restoring a run: weights, optimizer state, counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megamem.model import MemoryGPTModel
from pretrain.build import unwrap
from pretrain.checkpoint import folder as folders
from pretrain.checkpoint.storage import load_tensors, save_tensors
from pretrain.config.loader import to_dict
from pretrain.config.schema import RunConfig
from pretrain.errors import CheckpointError
from pretrain.optimizer import MemoryOptimizer
from pretrain.state import RunState


def save_run(
    config: RunConfig,
    state: RunState,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MemoryOptimizer,
    folder: Path,
) -> Path:
    """Write the checkpoint of the current step and remove superseded ones. Collective.

    Returns:
        The checkpoint's folder, inside of `folder`.

    Raises:
        CheckpointError: it cannot be written; earlier ones are intact.
    """
    main = dist.get_rank() == 0
    path = folders.writing_folder(folder, state.step)
    if main:
        _or_error(lambda: folders.start_writing(folder, state.step), path)
    dist.barrier()
    save_tensors(_entries(chunks, optimizer), path)
    if main:
        _or_error(lambda: _finish(config, state, folder), path)
    dist.barrier()
    return folders.step_folder(folder, state.step)


def _finish(config: RunConfig, state: RunState, folder: Path) -> None:
    folders.complete(
        folder,
        state.step,
        run=asdict(state),
        # Random numbers of a step follow from these two; see `pretrain.loop.seed_step`.
        rng={"seed": config.seed, "step": state.step},
        config=to_dict(config),
        versions=folders.package_versions(),
    )
    rules = config.checkpoint
    folders.remove_superseded(folder, state.step, keep_last=rules.keep_last, keep_every_steps=rules.keep_every_steps)


def _or_error(action: Callable[[], object], path: Path) -> None:
    try:
        action()
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint cannot be written to {path}: {error}. Earlier checkpoints are intact"
        ) from error


def restore_run(
    saved: folders.SavedState, chunks: Sequence[DistributedDataParallel], optimizer: MemoryOptimizer
) -> None:
    """Load weights and optimizer state in place, whatever layout wrote them. Collective.

    Raises:
        CheckpointError: the checkpoint cannot be read, or is of another model.
    """
    loaded = load_tensors(_entries(chunks, optimizer), saved.path)
    _load_chunks([unwrap(chunk) for chunk in chunks], loaded)
    optimizer.set_num_updates(saved.run.num_updates)


def load_weights(path: Path, chunks: Sequence[MemoryGPTModel]) -> None:
    """Load the weights alone into bare chunks. Collective.

    Raises:
        CheckpointError: the checkpoint cannot be read, or is of another model.
    """
    _load_chunks(chunks, load_tensors(_model_entries(chunks), path))


def _load_chunks(chunks: Sequence[MemoryGPTModel], loaded: dict[str, Any]) -> None:
    for index, chunk in enumerate(chunks):
        result = chunk.load_state_dict(loaded[f"model{index}"], strict=False)
        missing = [name for name in result.missing_keys if not name.endswith("_extra_state")]
        assert not missing, f"the checkpoint's entries left {missing} unset"
        chunk.weights_are_set = True


def _model_entries(chunks: Sequence[MemoryGPTModel]) -> dict[str, Any]:
    return {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}


def _entries(chunks: Sequence[DistributedDataParallel], optimizer: MemoryOptimizer) -> dict[str, Any]:
    model = _model_entries([unwrap(chunk) for chunk in chunks])
    return {**model, "optimizer": optimizer.sharded_state_dict(model)}
