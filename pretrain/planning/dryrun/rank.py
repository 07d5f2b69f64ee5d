"""The real rank of a real run, built and stepped once on tensors without data.

Parallel state, model chunks, DDP, optimizer and schedule are those of a run; see `pretrain.planning.dryrun.world` for what is
not. Kernels are the Triton ones, which a run on GPUs uses: their custom ops say what they allocate. All else takes the
CPU's branches, or with `as_gpu` a GPU's (`pretrain.planning.dryrun.gpu`).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
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
from pretrain.engine.build import build_unset_chunks, unwrap, wrap_chunks
from pretrain.engine.build_optimizer import build_optimizer
from pretrain.engine.megatron import parallel_sizes
from pretrain.engine.optimizer import MemoryOptimizer
from pretrain.engine.row_gradients import row_gradient_of
from pretrain.engine.step import Batch, train_step
from pretrain.engine.stored_tables import StoredTable, stored_tables_of
from pretrain.engine.weight_gathering import start_gathering
from pretrain.errors import ConfigError
from pretrain.planning.costs.read_rows import has_scales
from pretrain.planning.dryrun import commands
from pretrain.planning.dryrun.budgets import CommandTraffic
from pretrain.planning.dryrun.collectives import Collective
from pretrain.planning.dryrun.gpu import StandInGpu
from pretrain.planning.dryrun.gpu_work import GpuWork
from pretrain.planning.dryrun.host_traffic import HostTraffic
from pretrain.planning.dryrun.moved import MovedBytes
from pretrain.planning.dryrun.order import Race
from pretrain.planning.dryrun.order_watch import OrderWatch
from pretrain.planning.dryrun.parts import MemoryPart
from pretrain.planning.dryrun.recorder import Recorder, Snapshot
from pretrain.planning.dryrun.tables import NO_SAMPLES, DryReads
from pretrain.planning.dryrun.world import fake_rank, without_data


@dataclass(frozen=True)
class RankReport:
    """Observations of one rank.

    Attributes:
        rank: of `world_size`.
        stage: its pipeline stage.
        num_parameters: elements of its weights, and of those in tables.
        held: bytes by part between steps, with the optimizer's state.
        peak_of_building: until model, DDP and optimizer were there.
        peak_of_step: of one optimizer step.
        collectives: of that step, in order.
        num_host_reads: values that the host reads in that step.
        num_kernels: that the step launches, about.
        num_microbatches: of that step.
        traffic: between host and GPU in that step and other commands, if the rank was run as on one.
        races: accesses of that step, the next and other commands that have no order, if order was watched.
        next_collectives: of the next step, if order was watched.
        moved: bytes that the device's operations moved in that step, by line, if they were counted.
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
    traffic: tuple[CommandTraffic, ...] = ()
    races: tuple[Race, ...] = ()
    next_collectives: tuple[Collective, ...] = ()
    moved: Mapping[str, int] = field(default_factory=dict)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the step's peak on top of those held."""
        return self.peak_of_step.total - self.held.total


def dry_run(
    config: RunConfig,
    world_size: int,
    ranks: Sequence[int],
    *,
    as_gpu: bool = False,
    in_order: bool = False,
    all_commands: bool = False,
    count_moved: bool = False,
) -> Iterator[RankReport]:
    """One step of each of these ranks, one after the other, in this process.

    Args:
        config: valid on `world_size` ranks, with `model.vocab_size`.
        as_gpu: take a GPU's branches, and watch what passes between it and the host.
        in_order: as a GPU, also take a second step, and watch the order of accesses to memory in both. DDP learns in
            the first one when gradients are complete, and reduces them beside backward from the second on.
        all_commands: as a GPU, watch other commands too; generation for the first of the ranks alone, as it has a layout of
            its own.
        count_moved: as a GPU, also count the bytes that operations move (`pretrain.planning.dryrun.moved`).

    Raises:
        ConfigError: it has what a dry run cannot follow, or this process sees a GPU.
    """
    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size is left to the tokenizer, which a dry run does not read: set it")
    # Its compiled kernels take no tensors without memory.
    config = without_apex(config)
    if torch.cuda.is_available():
        raise ConfigError("a dry run computes nothing and wants no GPU: set CUDA_VISIBLE_DEVICES to nothing")
    if config.model.memory is not None and find_spec("triton") is None:
        raise ConfigError("triton is not installed, whose kernels a dry run counts: pip install -e '.[gpu]'")
    for rank in ranks:
        # Nothing that is there is garbage of a run: to look through it takes longer than to step a small model.
        gc.freeze()
        with warnings.catch_warnings():
            # Megatron warns about optional packages.
            warnings.simplefilter("ignore")
            gpu = StandInGpu() if as_gpu else None
            with fake_rank(rank, world_size, parallel_sizes(config), seed=config.seed, gpu=gpu) as groups:
                report = _step_of(
                    config, groups, gpu, in_order=in_order, all_commands=all_commands, count_moved=count_moved
                )
            if as_gpu and all_commands and rank == ranks[0]:
                traffic, races = commands.generation(config, in_order=in_order)
                report = replace(report, traffic=(*report.traffic, traffic), races=(*report.races, *races))
        # Models and optimizers are cycles, and hold groups.
        gc.collect()
        gc.unfreeze()
        yield report


def first_ranks_of_stages(config: RunConfig, world_size: int) -> range:
    """The first rank of every pipeline stage: all ranks of a stage do the same to other tokens."""
    return range(0, world_size, world_size // config.parallel.pipeline)


def _step_of(
    config: RunConfig,
    groups: ParallelGroups,
    gpu: StandInGpu | None,
    *,
    in_order: bool,
    all_commands: bool,
    count_moved: bool,
) -> RankReport:
    train = config.train
    num_microbatches = train.global_batch_size // (train.micro_batch_size * groups.data_size)
    # Whole sequences of one document, known to the host.
    bounds = document_bounds(torch.arange(train.sequence_length).expand(train.micro_batch_size, -1))
    moe = config.model.moe
    with (
        without_data(groups, experts_per_token=moe.top_k if moe is not None else 0, gpu=gpu) as recorder,
        patch("pretrain.data.loader.document_bounds", lambda _: bounds),
    ):
        chunks, optimizer = _build(config, groups)
        gc.collect()
        _assign_state(recorder, chunks, optimizer)
        peak_of_building, held = recorder.peak, recorder.now()
        moved = MovedBytes() if gpu is not None and count_moved else None
        work = GpuWork(partial(_launched, recorder, moved)) if gpu is not None else None
        watch = HostTraffic(gpu) if gpu is not None else None
        order = OrderWatch(gpu) if gpu is not None and in_order else None
        batches = [on_device(repeat(_batch(config)), groups.device) for _ in chunks]
        bare = [unwrap(chunk) for chunk in chunks]
        stored, reads = stored_tables_of(bare), DryReads(NO_SAMPLES, bare, groups, train.sequence_length)

        def step() -> None:
            samples = [range(train.global_batch_size)] * 3
            with nullcontext() if stored is None else stored.step(reads, samples[0], samples[1:]):
                train_step(
                    chunks,
                    optimizer,
                    batches,
                    groups,
                    num_microbatches=num_microbatches,
                    micro_batch_size=train.micro_batch_size,
                    sequence_length=train.sequence_length,
                )

        tables = sum(table.numel() for chunk in chunks for table in unwrap(chunk).banks.parameters())
        with (
            moved.counting() if moved is not None else nullcontext(),
            # Below the watch of order, which sees a Triton op as one access to each of its arguments.
            work.working() if work is not None else nullcontext(),
            order.watching() if order is not None else nullcontext(),
        ):
            # As after an update, which starts the first gathers that the next forward pass waits for.
            start_gathering(chunks)
            recorder.restart_peak()
            recorder.collectives.clear()
            recorder.num_host_reads = recorder.num_kernels = 0
            with watch.watching() if watch is not None else nullcontext():
                step()
            report = RankReport(
                rank=groups.rank,
                world_size=groups.world_size,
                stage=groups.pipeline_rank,
                num_parameters=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
                num_table_parameters=tables,
                held=held,
                peak_of_building=peak_of_building,
                peak_of_step=recorder.peak,
                collectives=tuple(recorder.collectives),
                num_host_reads=recorder.num_host_reads,
                num_kernels=recorder.num_kernels,
                num_microbatches=num_microbatches,
                moved=moved.by_line() if moved is not None else {},
            )
            if order is not None:
                recorder.collectives.clear()
                step()
                report = replace(report, next_collectives=tuple(recorder.collectives))
            if gpu is None or watch is None:
                return report
            traffic = [_of_training(config, watch, chunks, optimizer, num_microbatches)]
            if all_commands:
                traffic += [
                    commands.evaluation(config, chunks, groups, gpu, partial(_batch, config)),
                    commands.saving(config, chunks, optimizer, gpu),
                    commands.restoring(chunks, optimizer, gpu),
                ]
            return replace(report, traffic=tuple(traffic), races=() if order is None else order.races)


def _of_training(
    config: RunConfig,
    watch: HostTraffic,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MemoryOptimizer,
    num_microbatches: int,
) -> CommandTraffic:
    """Traffic of the step that was watched, with the units that its budget counts by."""
    units = commands.units_of_passes(chunks, num_microbatches)
    units["mixture"] *= 2 if config.train.recompute == "full" else 1
    units["window"] = optimizer.num_windows
    return CommandTraffic("training", watch.findings(), units)


def _launched(recorder: Recorder, moved: MovedBytes | None, kernel: str, arguments: Mapping[str, Any]) -> None:
    recorder.count_kernel()
    if moved is not None:
        moved.launch(kernel, arguments)


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


def _batch(config: RunConfig) -> Batch:
    """A microbatch of [b, s]."""
    shape = config.train.micro_batch_size, config.train.sequence_length
    ids = torch.zeros(shape, dtype=torch.int64)
    return {"tokens": ids, "labels": ids.clone(), "position_ids": ids.clone(), "loss_mask": torch.ones(shape)}
