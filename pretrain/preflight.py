"""What keeps a run from starting on this machine, found before anything slow is imported or started."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from megamem.config import ModelConfig
from parallel.devices import built_without_cuda, num_visible_gpus
from pretrain.checkpoint.folder import list_checkpoints, read_state
from pretrain.config.schema import RunConfig
from pretrain.costs.formulas import count_parameters
from pretrain.data.blend import check_fits, model_vocab_size, open_blend
from pretrain.errors import CheckpointError, ConfigError
from pretrain.folder import RunFolder
from pretrain.saved_run import check_resumable

_BYTES_OF_WEIGHT_AND_GRADIENT = 4 + 4
_BYTES_OF_MOMENTS = 4 + 4


def check_start(config: RunConfig, num_ranks: int, folder: RunFolder, *, local: bool) -> None:
    """Look at data, run folder and memory as a run would meet them.

    Args:
        config: of the run, valid in itself.
        num_ranks: of the run.
        local: all of them are to run on this machine.

    Raises:
        DataError: a data set is missing or damaged, or they do not go together.
        ConfigError: the vocabulary or the machine's memory is too small, or torch cannot use the GPUs.
        CheckpointError: the folder holds another run.
    """
    datasets = open_blend(config.data.datasets)
    for dataset in datasets:
        check_fits(dataset, config.train.sequence_length)
    vocab_size = model_vocab_size(config.model, datasets[0].tokenizer)
    if num_visible_gpus() and version("torch").endswith("+cpu"):
        raise ConfigError(
            f"this machine has GPUs that cannot be used: {built_without_cuda()}. To leave them idle, add --device cpu"
        )
    if local and not num_visible_gpus():
        _check_memory(replace(config.model, vocab_size=vocab_size), config, num_ranks)
    if local:
        # Ranks that were started elsewhere leave this to rank 0, when they open the run: each would look at every file
        # of a checkpoint, of which there are as many as ranks.
        _check_same_run(config, folder)


def _check_memory(model: ModelConfig, config: RunConfig, num_ranks: int) -> None:
    """Weights and gradients, once per replica, and moments: what is left out (activations, buffers) only adds."""
    counts = count_parameters(model)
    layout = config.parallel
    replicas = max(1, num_ranks // (layout.tensor * layout.pipeline * layout.context))
    backbone = counts.total - counts.tables
    needed = backbone * (replicas * _BYTES_OF_WEIGHT_AND_GRADIENT + _BYTES_OF_MOMENTS)
    needed += counts.tables * (_BYTES_OF_WEIGHT_AND_GRADIENT + _BYTES_OF_MOMENTS)
    available = machine_memory_bytes()
    if needed > available:
        raise ConfigError(
            f"the model has {counts.total:,} parameters ({counts.tables:,} in tables), which with their gradients and "
            f"optimizer state need at least {_gigabytes(needed)} on {num_ranks} ranks, and this machine has "
            f"{_gigabytes(available)}: make it smaller, or train on more machines"
        )


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


def machine_memory_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return physical
    return min(physical, limit)


def _check_same_run(config: RunConfig, folder: RunFolder) -> None:
    """Against the newest checkpoint that can be read; whether it is whole is looked at when it is loaded."""
    for path in reversed(list_checkpoints(folder.checkpoints)):
        try:
            saved = read_state(path)
        except CheckpointError:
            continue
        check_resumable(config, saved)
        return
