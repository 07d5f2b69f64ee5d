"""The real rank of a real run, built and stepped once on tensors without data.

Parallel state, model chunks, DDP, optimizer and schedule are those of a run; see `pretrain.planning.dryrun.world` for what is
not. Kernels are the Triton ones, which a run on GPUs uses: their custom ops say what they allocate. All else takes the
CPU's branches, or with `as_gpu` a GPU's (`pretrain.planning.dryrun.gpu`).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import repeat
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.distributed import DistributedDataParallel

from kernels.common.table_scale import scale_of
from kernels.select import Kernels, assemble, implementation_of, resolve
from megamem.attention.documents import document_bounds
from parallel.groups import ParallelGroups
from pretrain.config.apex import without_apex
from pretrain.config.schema import RunConfig
from pretrain.data.loader import on_device
from pretrain.engine.build import build_unset_chunks, wrap_chunks
from pretrain.engine.build_optimizer import build_optimizer
from pretrain.engine.chunks import unwrap
from pretrain.engine.megatron import parallel_sizes
from pretrain.engine.optimizer import MemoryOptimizer
from pretrain.engine.step import Batch, train_step
from pretrain.engine.tables.row_gradients import row_gradient_of
from pretrain.engine.tables.stored_tables import StoredTable, stored_tables_of
from pretrain.engine.weight_gathering import start_gathering
from pretrain.errors import ConfigError
from pretrain.planning.bytes.row_bytes import has_scales
from pretrain.planning.dryrun.collectives import Collective
from pretrain.planning.dryrun.gpu import StandInGpu
from pretrain.planning.dryrun.gpu_work import GpuWork
from pretrain.planning.dryrun.parts import MemoryPart
from pretrain.planning.dryrun.recorder import Recorder, Snapshot
from pretrain.planning.dryrun.tables import NO_SAMPLES, DryReads
from pretrain.planning.dryrun.world import fake_rank, without_data

# Megatron's schedules import it in the first step of a process, where its constant would count as a kernel.
import_module("megatron.core.transformer.multi_token_prediction")


@dataclass(frozen=True)
class RankReport:
    """Observations of one rank.

    Attributes:
        rank: place among `world_size` ranks.
        stage: pipeline stage of the rank.
        num_parameters: elements of its weights, and of those in tables.
        held: bytes by part between steps, with the optimizer's state.
        peak_of_building: bytes by part at the largest moment until model, DDP and optimizer were there.
        peak_of_step: bytes by part at the largest moment of one optimizer step.
        collectives: calls of that step, in order.
        num_host_reads: values that the host reads in that step.
        num_kernels: kernels that the step launches, about.
        num_microbatches: microbatches of that step.
        next_collectives: calls of the next step, if it was taken.
    """

    rank: int
    world_size: int
    stage: int
    num_parameters: int
    num_table_parameters: int
    held: Snapshot
    peak_of_building: Snapshot
    peak_of_step: Snapshot
    collectives: tuple[Collective, ...]
    num_host_reads: int
    num_kernels: int
    num_microbatches: int
    next_collectives: tuple[Collective, ...] = ()

    @property
    def activation_bytes(self) -> int:
        """Bytes of the step's peak on top of those held."""
        return self.peak_of_step.total - self.held.total


def dry_run(
    config: RunConfig, world_size: int, ranks: Sequence[int], *, as_gpu: bool = False, next_step: bool = False
) -> Iterator[RankReport]:
    """One step of each of these ranks, one after the other, in this process.

    Args:
        config: configuration that is valid on `world_size` ranks, with `model.vocab_size`.
        as_gpu: take a GPU's branches.
        next_step: also take a second step. DDP learns in the first one when gradients are complete, and reduces them
            beside backward from the second on.

    Raises:
        ConfigError: the configuration has what a dry run cannot follow, or this process sees a GPU.
    """
    for number in ranks:
        with built_rank(config, world_size, number, gpu=StandInGpu() if as_gpu else None) as rank, rank.working():
            report = rank.count_step()
            yield replace(report, next_collectives=rank.count_step().collectives) if next_step else report


def first_ranks_of_stages(config: RunConfig, world_size: int) -> range:
    """The first rank of every pipeline stage: all ranks of a stage do the same to other tokens."""
    return range(0, world_size, world_size // config.parallel.pipeline)


@contextmanager
def built_rank(config: RunConfig, world_size: int, number: int, *, gpu: StandInGpu | None = None) -> Iterator[DryRank]:
    """A rank with its model, DDP and optimizer, until the block ends.

    Args:
        config: configuration that is valid on `world_size` ranks, with `model.vocab_size`.
        number: place of the rank.
        gpu: stand-in whose branches the rank takes; None: the rank takes the CPU's.

    Raises:
        ConfigError: the configuration has what a dry run cannot follow, or this process sees a GPU.
    """
    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size is left to the tokenizer, which a dry run does not read: set it")
    # Its compiled kernels take no tensors without memory.
    config = without_apex(config)
    if torch.cuda.is_available():
        raise ConfigError("a dry run computes nothing and wants no GPU: set CUDA_VISIBLE_DEVICES to nothing")
    if config.model.memory is not None and find_spec("triton") is None:
        raise ConfigError("triton is not installed, whose kernels a dry run counts: pip install -e '.[gpu]'")
    # Whole sequences of one document, known to the host.
    train = config.train
    bounds = document_bounds(torch.arange(train.sequence_length).expand(train.micro_batch_size, -1))
    moe = config.model.moe
    # Nothing that is there is garbage of a run: to look through it takes longer than to step a small model.
    gc.freeze()
    try:
        with (
            warnings.catch_warnings(),
            fake_rank(number, world_size, parallel_sizes(config), seed=config.seed, gpu=gpu) as groups,
            without_data(groups, experts_per_token=moe.top_k if moe is not None else 0, gpu=gpu) as recorder,
            patch("pretrain.data.loader.document_bounds", lambda _: bounds),
        ):
            # Megatron warns about optional packages.
            warnings.simplefilter("ignore")
            chunks, optimizer = _build(config, groups)
            gc.collect()
            _assign_state(recorder, chunks, optimizer)
            yield DryRank(config, groups, gpu, recorder, chunks, optimizer)
    finally:
        # Models and optimizers are cycles, and hold groups.
        gc.collect()
        gc.unfreeze()


class DryRank:
    """A built rank on tensors without data.

    Attributes:
        config: configuration of the run.
        groups: process groups of the rank.
        gpu: stand-in for its GPU, if it has one.
        chunks: model chunks of the rank.
        optimizer: optimizer with all of its state.
        num_microbatches: microbatches of a step.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        gpu: StandInGpu | None,
        recorder: Recorder,
        chunks: list[DistributedDataParallel],
        optimizer: MemoryOptimizer,
    ) -> None:
        """Take over what was built; `recorder` has seen it all."""
        self.config, self.groups, self.gpu, self.chunks, self.optimizer = config, groups, gpu, chunks, optimizer
        train = config.train
        self.num_microbatches = train.global_batch_size // (train.micro_batch_size * groups.data_size)
        self._recorder = recorder
        self._peak_of_building, self._held = recorder.peak, recorder.now()
        self._batches = [on_device(repeat(batch_of(config)), groups.device) for _ in chunks]
        self._bare = [unwrap(chunk) for chunk in chunks]
        self._stored = stored_tables_of(self._bare)
        self._reads = DryReads(NO_SAMPLES, self._bare, groups, train.sequence_length)
        self._has_stepped = False

    @contextmanager
    def working(
        self, on_launch: Callable[[str, Mapping[str, Any]], None] = lambda kernel, arguments: None
    ) -> Iterator[None]:
        """Within the block kernels of a GPU are counted, with their scratch, if the rank has one.

        Args:
            on_launch: function that is called with each kernel of Triton's and its arguments by name.
        """

        def launched(kernel: str, arguments: Mapping[str, Any]) -> None:
            self._recorder.count_kernel()
            on_launch(kernel, arguments)

        with nullcontext() if self.gpu is None else GpuWork(launched).working():
            yield

    def count_step(self, watching: AbstractContextManager[Any] | None = None) -> RankReport:
        """Observations of the next optimizer step.

        Args:
            watching: block that the step runs in, and not what an update before it has started.
        """
        recorder = self._recorder
        if not self._has_stepped:
            # As after an update, which starts the first gathers that the next forward pass waits for.
            start_gathering(self.chunks)
            self._has_stepped = True
        every = self.config.optimizer.tables_every
        for number in range(1, every):
            # The step that updates tables has most to do, with what these have left.
            self._step((False, number + 1 == every))
        recorder.restart_peak()
        recorder.collectives.clear()
        recorder.num_host_reads = recorder.num_kernels = 0
        with nullcontext() if watching is None else watching:
            self._step((True, every == 1))
        return RankReport(
            rank=self.groups.rank,
            world_size=self.groups.world_size,
            stage=self.groups.pipeline_rank,
            num_parameters=sum(p.numel() for chunk in self.chunks for p in chunk.parameters()),
            num_table_parameters=sum(table.numel() for chunk in self._bare for table in chunk.banks.parameters()),
            held=self._held,
            peak_of_building=self._peak_of_building,
            peak_of_step=recorder.peak,
            collectives=tuple(recorder.collectives),
            num_host_reads=recorder.num_host_reads,
            num_kernels=recorder.num_kernels,
            num_microbatches=self.num_microbatches,
        )

    def _step(self, updates: tuple[bool, bool]) -> None:
        """One step; `updates` as of `StoredTables.step`."""
        train = self.config.train
        samples = [range(train.global_batch_size)] * 3
        stored = self._stored
        with nullcontext() if stored is None else stored.step(self._reads, samples[0], samples[1:], updates):
            train_step(
                self.chunks,
                self.optimizer,
                self._batches,
                self.groups,
                num_microbatches=self.num_microbatches,
                micro_batch_size=train.micro_batch_size,
                sequence_length=train.sequence_length,
                updates_tables=updates[0],
            )


def _build(config: RunConfig, groups: ParallelGroups) -> tuple[list[DistributedDataParallel], MemoryOptimizer]:
    """Build chunks and optimizer as a run does, with all the state that a run has from its first update on."""
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    # A GPU's are chosen as a launch chooses them.
    kernels = None if groups.on_gpu else _gpu_kernels()
    bare = build_unset_chunks(config, groups, vocab_size=vocab_size, kernels=kernels)
    for chunk in bare:
        chunk.weights_are_set = True
    chunks = wrap_chunks(bare, config, groups)
    optimizer = build_optimizer(config, chunks, groups)
    optimizer.set_num_updates(lambda _: 0)
    if has_scales(config):
        for table in (table for chunk in bare for bank in chunk.own_banks for table in bank.parameters()):
            if (scale := scale_of(table)) is not None:
                # As after an update: gathers multiply by any but 1.
                scale.value = 0.5
    return chunks, optimizer


def _gpu_kernels() -> Kernels | None:
    if find_spec("triton") is None:
        return None
    chosen = resolve("triton", {}, "cuda")
    return assemble(chosen, {op: implementation_of(op, name) for op, name in chosen.items()})


def _assign_state(recorder: Recorder, chunks: Sequence[DistributedDataParallel], optimizer: MemoryOptimizer) -> None:
    """Say which buffers are weights, gradients and optimizer state."""
    for chunk in chunks:
        for buffers, weights, gradients in (
            (chunk.buffers, MemoryPart.WEIGHTS, MemoryPart.GRADIENTS),
            (chunk.expert_parallel_buffers, MemoryPart.TABLES, MemoryPart.TABLE_GRADIENTS),
        ):
            recorder.assign([b.param_data for b in buffers if b.param_data is not None], weights)
            recorder.assign([b.grad_data for b in buffers], gradients)
        # Weights that are not trained are in no buffer, nor tables whose gradients are the rows that were read.
        banks = unwrap(chunk).own_banks
        tables = {parameter for bank in banks for parameter in bank.parameters()}
        in_files = {
            parameter for bank in banks if isinstance(bank.fetched, StoredTable) for parameter in bank.parameters()
        }
        still = [p for p in chunk.parameters() if not p.requires_grad or row_gradient_of(p) is not None]
        recorder.assign([p for p in still if p in tables - in_files], MemoryPart.TABLES)
        recorder.assign([p for p in still if p not in tables], MemoryPart.WEIGHTS)
        # Constants of modules (`MemoryConfig.fixed_bytes`).
        recorder.assign(unwrap(chunk).buffers(), MemoryPart.WEIGHTS)
    dense, *split = optimizer.chained_optimizers
    for part, of_domain in (
        (MemoryPart.OPTIMIZER, dense),
        *((MemoryPart.TABLE_OPTIMIZER, of_domain) for of_domain in split),
    ):
        if of_domain.is_stub_optimizer:
            continue
        # In fp32 the main weights are the model's own.
        own = {p.untyped_storage()._cdata for chunk in chunks for p in chunk.parameters()}
        state = [t for t in of_domain.device_state() if t.untyped_storage()._cdata not in own]
        recorder.assign(state, part)


def batch_of(config: RunConfig) -> Batch:
    """Microbatch of [b, s] on the host."""
    shape = config.train.micro_batch_size, config.train.sequence_length
    ids = torch.zeros(shape, dtype=torch.int64)
    return {"tokens": ids, "labels": ids.clone(), "position_ids": ids.clone(), "loss_mask": torch.ones(shape)}
