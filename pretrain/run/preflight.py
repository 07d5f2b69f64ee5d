"""Checks that a run can start on this machine, before anything slow is imported or started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from megamem.config.model import ModelConfig
from parallel.machine.devices import built_without_cuda, num_visible_gpus, smallest_gpu_bytes
from pretrain.checkpoint.folder import SavedState, newest_readable, refuse_taken_names
from pretrain.checkpoint.newest import newest_complete
from pretrain.config.position import last_sample
from pretrain.config.schema import RunConfig
from pretrain.config.stages import stage_of_step, stands_at
from pretrain.config.updates import GRADIENT_BYTES, held_table_gradient_bytes
from pretrain.config.validate import validate
from pretrain.data.blend import check_document_order, check_epochs, check_fits, model_vocab_size, open_blend
from pretrain.data.manifest import PreparedDataset
from pretrain.data.ngram_ids import check_token_maps
from pretrain.errors import ConfigError, UserError
from pretrain.planning.bytes.held import held_bytes
from pretrain.planning.bytes.row_bytes import lies_in_files
from pretrain.planning.bytes.state import dense_state, elements_of_tables, saved_by_matrices, table_state
from pretrain.planning.counts.formulas import count_parameters
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import check_resumable
from pretrain.run.trained_data import check_trained_data


def check_stages(
    stages: Sequence[RunConfig], num_ranks: int, folder: RunFolder, *, local: bool, start: SavedState | None = None
) -> None:
    """`validate` and `check_start` of every stage of a run, whose name an error says.

    Args:
        start: the checkpoint that the run goes on from while its folder has none.

    Raises:
        UserError: a stage is refused by `validate` or `check_start`.
    """
    for config in stages:
        with naming_stage(config):
            check_start(validate(config, num_ranks), num_ranks, folder, local=local, start=start)


@contextmanager
def naming_stage(config: RunConfig) -> Iterator[None]:
    """Name the stage in a user's error, in a run of several."""
    try:
        yield
    except UserError as error:
        if config.stage is None:
            raise
        raise error.saying(f"stage {config.stage.name}: {error}") from error


def check_start(
    config: RunConfig, num_ranks: int, folder: RunFolder, *, local: bool, start: SavedState | None = None
) -> RunConfig:
    """Look at data, run folder and memory as a run would meet them. Returns the configuration with the data's vocabulary.

    Args:
        config: configuration of the run, valid in itself.
        num_ranks: ranks of the run.
        local: all of them are to run on this machine.
        start: the checkpoint that the run goes on from while its folder has none.

    Raises:
        DataError: a data set is missing or damaged, they do not go together, or a checkpoint was trained on other data.
        ConfigError: the vocabulary or the machine's memory is too small, or torch cannot use the GPUs.
        CheckpointError: the folder holds another run.
    """
    vocab_size, datasets = _check_data(config)
    if num_visible_gpus() and version("torch").endswith("+cpu"):
        raise ConfigError(
            f"this machine has GPUs that cannot be used: {built_without_cuda()}. To leave them idle, add --device cpu"
        )
    sized = replace(config, model=replace(config.model, vocab_size=vocab_size))
    if local:
        if not num_visible_gpus():
            _check_memory(sized.model, config, num_ranks)
        elif gpu_bytes := smallest_gpu_bytes():
            check_gpu_memory(sized, num_ranks, gpu_bytes)
        # Ranks that were started elsewhere leave this to rank 0, when they open the run: each would look at every file
        # of a checkpoint, of which there are as many as ranks.
        saved = newest_readable(folder.checkpoints)
        refuse_taken_names(folder.checkpoints, 0 if saved is None else saved.step)
        if saved is not None:
            # Loading it checks whether it is whole.
            check_resumable(config, saved)
        if (saved := saved or start) is not None:
            _check_same_data(config, saved, datasets)
    return sized


def check_submission(
    stages: Sequence[RunConfig],
    num_ranks: int,
    folder: RunFolder,
    gpu_bytes: float | None = None,
    start: SavedState | None = None,
) -> None:
    """Look at data, run folder and checkpoint of a run that is to start on other machines, which see the same folders.

    Args:
        stages: configurations of the run's stages, or its one configuration.
        num_ranks: ranks of the run.
        folder: the run's folder.
        gpu_bytes: memory of a rank's GPU there, in bytes; None: not known, or ranks use CPUs.
        start: the checkpoint that it goes on from while it has none of its own.

    Raises:
        DataError: a data set is missing or damaged, they do not go together, or the checkpoint was trained on other data.
        ConfigError: layout, batch, vocabulary or the GPU's memory do not fit, or the folder cannot be written.
        CheckpointError: the folder holds another run, or no checkpoint in it can be read.
    """
    opened = []
    for config in stages:
        with naming_stage(config):
            config = validate(config, num_ranks, on_this_machine=False)
            vocab_size, datasets = _check_data(config)
            opened.append(datasets)
            if gpu_bytes is not None:
                sized = replace(config, model=replace(config.model, vocab_size=vocab_size))
                check_gpu_memory(sized, num_ranks, gpu_bytes)
    folder.check_writable()
    newest, _ = newest_complete(folder.checkpoints)
    if newest is not None:
        check_resumable(stages[stage_of_step(stages, newest.run.num_finished)], newest)
    elif start is not None:
        check_resumable(stages[0], start, as_new_run=True)
    if (newest := newest or start) is not None:
        for config, datasets in zip(stages, opened, strict=True):
            with naming_stage(config):
                _check_same_data(config, newest, datasets)


def _check_data(config: RunConfig) -> tuple[int, list[PreparedDataset]]:
    """Open every data set. Returns how many token ids the model has, and the data sets that are trained on."""
    datasets = open_blend(config.read_data)
    trained_on, length = datasets[: len(config.data.datasets)], config.train.sequence_length
    for dataset in trained_on:
        check_fits(dataset, length)
    check_epochs(config.data.datasets, trained_on, length, last_sample(config))
    check_token_maps(config.model, datasets[0].tokenizer)
    _check_read_counts(config)
    if config.data.shuffle == "documents":
        check_document_order(config.data.datasets, trained_on, length, last_sample(config))
    return model_vocab_size(config.model, datasets[0].tokenizer), trained_on


def _check_read_counts(config: RunConfig) -> None:
    """Refuse files of reads that are not there; ranks look into them."""
    rows = config.optimizer.trained_rows
    for name in ("background", "text") if rows is not None else ():
        path = getattr(rows, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(
                f"optimizer.trained_rows.{name} is {path}, which is no file: write it with `megamem patch counts`"
            )


def _check_memory(model: ModelConfig, config: RunConfig, num_ranks: int) -> None:
    """Refuse weights and gradients, once per replica, and optimizer state beyond memory; the rest only adds."""
    counts = count_parameters(model)
    layout = config.parallel
    replicas = max(1, num_ranks // (layout.tensor * layout.pipeline * layout.context))
    backbone = counts.total - counts.tables
    weight_and_gradient = config.train.element_bytes + GRADIENT_BYTES
    needed = backbone * (replicas * weight_and_gradient + dense_state(config))
    needed -= saved_by_matrices(config)
    for memory, elements in elements_of_tables(model):
        if not lies_in_files(config, memory):
            needed += elements * (
                config.train.element_bytes + held_table_gradient_bytes(config.optimizer) + table_state(config, memory)
            )
    available = machine_memory_bytes()
    if needed > available:
        raise ConfigError(
            f"the model has {counts.total:,} parameters ({counts.tables:,} in tables), which with their gradients and "
            f"optimizer state need at least {gigabytes(needed)} on {num_ranks} ranks, and this machine has "
            f"{gigabytes(available)}: make it smaller, or train on more machines"
        )


def check_gpu_memory(config: RunConfig, num_ranks: int, gpu_bytes: float) -> None:
    """Refuse what a GPU cannot hold even without activations.

    Args:
        config: configuration of the run; without `model.vocab_size`, embeddings are not counted.
        gpu_bytes: memory of a rank's GPU, in bytes.

    Raises:
        ConfigError: the GPU is too small; the message names what a rank would hold, and a layout that fits if there is
            one.
    """
    held = held_bytes(config, num_ranks)
    if held.total <= gpu_bytes:
        return
    fits = next(_splits_that_fit(config, num_ranks, gpu_bytes), None)
    holder = "a rank of the fullest stage" if config.parallel.pipeline > 1 else "a rank"
    fix = f"parallel.memory={fits[0]} splits tables and experts so that it is {gigabytes(fits[1])}" if fits else ""
    raise ConfigError(
        f"{holder} would hold {gigabytes(held.total)} ({gigabytes(held.model)} of weights and gradients, "
        f"{gigabytes(held.optimizer)} as its share of the optimizer's state) on {num_ranks} ranks, and a GPU has "
        f"{gigabytes(gpu_bytes)}, of which activations need some: "
        + (fix or "raise parallel.pipeline, use more GPUs, or make the model smaller")
    )


def _splits_that_fit(config: RunConfig, num_ranks: int, gpu_bytes: float) -> Iterator[tuple[int, float]]:
    """Larger memory groups that this layout can have, with what a rank would hold."""
    for size in range(config.parallel.memory + 1, num_ranks + 1):
        other = replace(config, parallel=replace(config.parallel, memory=size))
        try:
            validate(other, num_ranks)
        except ConfigError:
            continue
        if (held := held_bytes(other, num_ranks).total) <= gpu_bytes:
            yield size, held


def gigabytes(num_bytes: float) -> str:
    """Gigabytes, in words."""
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes < 100e9 else f"{num_bytes / 1e9:,.0f} GB"


def machine_memory_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return physical
    return min(physical, limit)


def _check_same_data(config: RunConfig, saved: SavedState, datasets: Sequence[PreparedDataset]) -> None:
    """See `check_trained_data`; data of a stage that is done is read no more."""
    if stands_at(config, saved.step) or (config.stage is not None and saved.step < config.stage.steps_before):
        check_trained_data(config, saved, datasets)
