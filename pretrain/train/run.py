"""A run: its folder, its parts, and where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel

from parallel.groups import ParallelGroups, barrier
from parallel.machine.atomic_write import atomic_write
from pretrain.checkpoint.folder import SavedState, read_state, refuse_taken_names, step_folder
from pretrain.checkpoint.newest import newest_complete, nothing_complete, refuse_damage
from pretrain.checkpoint.run_entries import entries_to_save, restore_run
from pretrain.checkpoint.saver import Saver
from pretrain.checkpoint.shared_check import damage_seen_by_ranks
from pretrain.config.loader import to_yaml
from pretrain.config.position import batch_size_of_run, check_position, position_in_data, samples_to_come
from pretrain.config.schema import RunConfig
from pretrain.config.updates import keeps_files
from pretrain.data.blend import model_vocab_size, open_blend, shared_tokenizer
from pretrain.data.dataset import TrainDataset, build_train_dataset, check_targets
from pretrain.data.held_out import HeldOutDataset
from pretrain.data.loader import Sample, microbatches, on_device
from pretrain.data.manifest import PreparedDataset, save_tokenizer
from pretrain.data.tokenizer import Tokenizer
from pretrain.engine.build import build_chunks, build_unset_chunks, wrap_chunks
from pretrain.engine.build_optimizer import build_optimizer
from pretrain.engine.chunks import unwrap
from pretrain.engine.microbatch_graph import MicrobatchGraph, microbatch_graph
from pretrain.engine.optimizer import MemoryOptimizer
from pretrain.engine.tables.step_reads import StepReads
from pretrain.engine.tables.stored_tables import StoredTables, stored_tables_of
from pretrain.engine.weight_gathering import complete_weights
from pretrain.errors import CheckpointError
from pretrain.planning.counts.formulas import training_flops_per_token
from pretrain.run.folder import RunFolder
from pretrain.run.metric_rows import numbered_rows
from pretrain.run.owner import Owner, owned
from pretrain.run.preflight import check_gpu_memory
from pretrain.run.saved_run import check_resumable, lost_of_tables, ranks_were_started
from pretrain.run.trained_data import check_trained_data, data_read, going_on
from pretrain.state import RunState
from pretrain.train.agreed_stop import AgreedStop
from pretrain.train.main_rank import done_by_main


@dataclass
class Run:
    """One rank's parts of a run. `state` and `last_saved_step` move on, `train_data` only if the run goes back; the rest
    stays.

    Attributes:
        train_data: samples in the order of the run.
        held_out: the validation documents.
        chunks: this rank's model chunks.
        flops_per_token: operations of training per token, for the metrics.
        last_saved_step: step of the newest checkpoint, or of the one that is being written, or None.
        saver: writes the checkpoints.
        graph: graph of a microbatch (`train.cuda_graph`).
        stop: heeded by the loop after a step, and by evaluations in their middle.
    """

    config: RunConfig
    folder: RunFolder
    groups: ParallelGroups
    tokenizer: Tokenizer
    train_data: TrainDataset
    held_out: HeldOutDataset
    chunks: list[DistributedDataParallel]
    optimizer: MemoryOptimizer
    state: RunState
    flops_per_token: float
    last_saved_step: int | None = None
    saver: Saver = field(default_factory=Saver)
    graph: MicrobatchGraph | None = None
    stop: AgreedStop = field(default_factory=AgreedStop)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the next step per data-parallel rank."""
        return self.batch_size // (self.config.train.micro_batch_size * self.groups.data_size)

    @property
    def batch_size(self) -> int:
        """Sequences of the next step over all ranks."""
        return batch_size_of_run(self.config.train, self.config.stage, self.state.step)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the next step over all ranks."""
        return self.batch_size * self.config.train.sequence_length

    @property
    def samples(self) -> range:
        """Numbers of the next step's samples over all ranks."""
        first = position_in_data(self.config, self.state)
        return range(first, first + self.batch_size)

    @property
    def following_samples(self) -> list[range]:
        """Numbers of the samples of the two steps after the next one, as far as there are any."""
        train, found = self.config.train, [self.samples]
        for step in range(self.state.step + 1, min(self.state.step + 3, train.num_steps)):
            first = found[-1].stop
            found.append(range(first, first + batch_size_of_run(train, self.config.stage, step)))
        return found[1:]

    @property
    def stored_tables(self) -> StoredTables | None:
        """The tables of this rank that lie in files (`optimizer.table_folder`); None: they are on the device."""
        if not keeps_files(self.config.optimizer):
            return None
        return stored_tables_of(unwrap(chunk) for chunk in self.chunks)

    @property
    def reads(self) -> StepReads:
        """The way to the rows that a step reads, of families of which tokens say so."""
        return StepReads(self.train_data, [unwrap(chunk) for chunk in self.chunks], self.groups)

    def rows_at_hand(self) -> AbstractContextManager[None]:
        """Block of the next step: within it the rows of tables in files that the step reads are on the device, and behind
        it those that it has updated are on their way back."""
        stored = self.stored_tables
        if stored is None:
            return nullcontext()
        return stored.step(self.reads, self.samples, self.following_samples, self.state.table_updates)

    def batches(self) -> list[Iterator[Sample]]:
        """A stream of training microbatches per model chunk, from where the run stands; all read the same samples."""
        return [
            on_device(
                microbatches(
                    self.train_data,
                    start_sample=position_in_data(self.config, self.state),
                    micro_batch_size=self.config.train.micro_batch_size,
                    data_rank=self.groups.data_rank,
                    data_size=self.groups.data_size,
                    num_workers=self.config.data.num_workers,
                ),
                self.groups.device,
            )
            for _ in self.chunks
        ]

    def complete_weights(self) -> None:
        """Complete the weights, before anybody but a forward pass reads them. Collective."""
        complete_weights(self.chunks)
        if self.stored_tables is not None:
            self.stored_tables.settle()

    def save(self) -> None:
        """Write a checkpoint, or begin to (`checkpoint.asynchronous`), unless this step has one. Collective."""
        if self.last_saved_step != self.state.step:
            self.complete_weights()
            entries = entries_to_save(self.config, self.chunks, self.optimizer)
            self.saver.start(self.config, self.state, entries, self.folder.checkpoints)
            self.last_saved_step = self.state.step


def open_run(
    config: RunConfig,
    folder: RunFolder,
    groups: ParallelGroups,
    start: SavedState | None = None,
    *,
    checked: bool = False,
) -> Run:
    """Build every part of a run, and restore its newest complete checkpoint if there is one. Collective.

    Args:
        start: a checkpoint to go on from, of this run or another of the same model, instead of the folder's newest.
        checked: the contents of `start` have been held against their hashes.

    Raises:
        UserError: the data, the configuration or the checkpoint lacks something.
    """
    train = config.train
    datasets = open_blend(config.read_data)
    tokenizer, trained_on = shared_tokenizer(datasets), datasets[: len(config.data.datasets)]
    saved = _checkpoint_to_go_on_from(config, folder, groups, start, trained_on, checked=checked)
    if saved is not None:
        tokenizer = going_on(tokenizer, saved)
    trained, tables_every = config.optimizer.trained, config.optimizer.tables_every
    state = RunState().training(trained).updating_tables(tables_every) if saved is None else saved.run
    # Whether checkpoints to come can have their names.
    done_by_main(partial(refuse_taken_names, folder.checkpoints, state.step))
    check_position(config, state, folder.path if saved is None else saved.path)
    vocab_size = model_vocab_size(config.model, tokenizer)
    model = replace(config.model, vocab_size=vocab_size)
    train_data = training_samples(config, state, tokenizer, folder)
    check_targets(train_data, position_in_data(config, state), [part.path for part in trained_on if part.has_unscored])
    held_out = HeldOutDataset(
        config.evaluated,
        train.sequence_length,
        config.evaluation.max_sequences,
        separate_documents=config.data.documents == "separate",
    )
    if groups.device.type == "cuda":
        gpu_bytes = torch.cuda.get_device_properties(groups.device).total_memory
        check_gpu_memory(replace(config, model=model), groups.world_size, gpu_bytes)
    build = build_chunks if saved is None else build_unset_chunks
    chunks = wrap_chunks(build(config, groups, vocab_size=vocab_size), config, groups)
    run = Run(
        config=config,
        folder=folder,
        groups=groups,
        tokenizer=tokenizer,
        train_data=train_data,
        held_out=held_out,
        chunks=chunks,
        optimizer=build_optimizer(config, chunks, groups),
        state=state,
        flops_per_token=training_flops_per_token(model, train.sequence_length, trained),
        graph=microbatch_graph(config, chunks, groups),
    )
    if saved is not None:
        with_moments = not resets_optimizer(config, saved)
        run.state = restore_run(
            saved, run.chunks, run.optimizer, trained=trained, tables_every=tables_every, with_moments=with_moments
        )
        is_own = saved.path.parent == folder.checkpoints
        if config.stage is None or is_own:
            run.last_saved_step = state.step
        run.state = replace(run.state, owes_evaluation=is_own and _owes_evaluation(run))
    run.state = run.state.reading(tokenizer.fingerprint, data_read(trained_on))
    _record_config(run)
    return run


def training_samples(config: RunConfig, state: RunState, tokenizer: Tokenizer, folder: RunFolder) -> TrainDataset:
    """The samples of a run, in its order, as many as it still needs from where it stands. Collective."""
    return build_train_dataset(
        config.data.datasets,
        sequence_length=config.train.sequence_length,
        num_samples=position_in_data(config, state) + samples_to_come(config, state),
        seed=config.data_seed,
        tokenizer=tokenizer,
        cache_dir=folder.data_cache,
        shuffle=config.data.shuffle,
        separate_documents=config.data.documents == "separate",
    )


@contextmanager
def owning(folder: RunFolder) -> Iterator[Owner | None]:
    """Rank 0 owns the run's folder until the block ends; None on the others. Collective.

    Raises:
        ConfigError: on every rank: the folder cannot be written, or another run owns it.
    """
    owner: list[Owner | None] = [None]
    with ExitStack() as stack:

        def take() -> None:
            owner[0] = stack.enter_context(owned(folder))

        done_by_main(take)
        yield owner[0]


def _owes_evaluation(run: Run) -> bool:
    """Tell whether the evaluation that a stop passed over is still to be made up for: its row is not there. Collective."""

    def is_owed() -> bool:
        rows = numbered_rows(run.folder.metrics, step=int)
        return not any(row.values["step"] == run.state.step and "validation_loss" in row.values for row in rows)

    return run.state.owes_evaluation and done_by_main(is_owed)


def _checkpoint_to_go_on_from(
    config: RunConfig,
    folder: RunFolder,
    groups: ParallelGroups,
    start: SavedState | None,
    datasets: Sequence[PreparedDataset],
    *,
    checked: bool,
) -> SavedState | None:
    """The checkpoint to go on from, after checking that it is of this run, and of this data."""
    check_hashes = config.checkpoint.check_hashes
    if start is None:
        saved = newest_checkpoint(folder, groups, check_hashes=check_hashes)
    else:
        saved = start
        if check_hashes and ranks_were_started() and not checked:
            refuse_damage(start, damage_seen_by_ranks(start))
    if saved is None:
        return None
    begins = config.stage is not None and saved.step == config.stage.steps_before
    changes = check_resumable(config, saved, as_new_run=begins and saved.path.parent != folder.checkpoints)
    told = [*check_trained_data(config, saved, datasets), *lost_of_tables(saved, config)]
    if check_hashes and any(file.sha256 is None for file in saved.files.values()):
        told.append(f"{saved.path} has format 1, which has no hashes: its files were held against their sizes alone")
    if groups.is_main:
        print(f"{'beginning' if begins else 'resuming'} from {saved.path} (step {saved.step})", flush=True)
        for change in changes:
            print(f"  changed since: {change}", flush=True)
        for sentence in told:
            print(f"  note: {sentence}", flush=True)
    return saved


def resets_optimizer(config: RunConfig, saved: SavedState) -> bool:
    """Tell whether moments start at zero: at the first step of a stage that asks for it.

    A checkpoint of that step is always from before the reset: the stage saves none before it has taken a step.
    """
    stage = config.stage
    return stage is not None and stage.optimizer_state == "reset" and saved.step == stage.steps_before


def newest_checkpoint(folder: RunFolder, groups: ParallelGroups, *, check_hashes: bool) -> SavedState | None:
    """The newest checkpoint of a run that is complete and, with `check_hashes`, whole. Collective.

    Raises:
        CheckpointError: on every rank: the run has checkpoints, and none can be read.
    """
    saved, problems = agreed_checkpoint(folder.checkpoints, check_hashes=check_hashes)
    if groups.is_main:
        for problem in problems:
            print(f"passed over a damaged checkpoint: {problem}", flush=True)
    return saved


def checkpoint_of_step(folder: RunFolder, step: int) -> SavedState:
    """The checkpoint of a step, which has just been written: read by rank 0, as others may see it a moment later.
    Collective.

    Raises:
        CheckpointError: on every rank: the checkpoint cannot be read.
    """
    return done_by_main(lambda: read_state(step_folder(folder.checkpoints, step)))


def agreed_checkpoint(
    folder: Path, *, check_hashes: bool, before: int | None = None
) -> tuple[SavedState | None, list[str]]:
    """The newest complete checkpoint (of those from before a step), and why newer ones were passed over. Collective.

    Rank 0 looks for it: ranks on other nodes may see a shared folder a moment later. All of them read it.
    """
    problems: list[str] = []
    while True:
        saved, passed_over = done_by_main(partial(_newest, folder, before, tuple(problems)))
        problems += passed_over
        if saved is None or not check_hashes:
            return saved, problems
        try:
            refuse_damage(saved, damage_seen_by_ranks(saved))
        except CheckpointError as error:
            problems.append(str(error))
            before = saved.step
        else:
            return saved, problems


def _newest(folder: Path, before: int | None, problems: Sequence[str]) -> tuple[SavedState | None, Sequence[str]]:
    """See `newest_complete`; `problems` are those of the checkpoints that are not from before that step."""
    try:
        found = newest_complete(folder, before=before)
    except CheckpointError as error:
        if not problems:
            raise
        raise nothing_complete(folder, [*problems, str(error)]) from error
    if problems and found[0] is None:
        raise nothing_complete(folder, problems)
    return found


def _record_config(run: Run) -> None:
    """Write the resolved configuration, whole or not at all, and the tokenizer into the run folder."""
    if run.groups.is_main:
        with atomic_write(run.folder.config) as stream:
            stream.write(to_yaml(run.config).encode())
        save_tokenizer(run.tokenizer, run.folder.tokenizer)
    barrier()
