"""Build model chunks under Megatron's DDP from a config and this rank's groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.module import Float16Module
from torch import nn

from kernels.implementations import KernelUnavailableError
from kernels.select import Kernels, select_kernels
from megamem.backbone.matrices import backbone_matrices
from megamem.backbone.norm import ApexRMSNorm, RMSNorm
from megamem.backbone.widths import set_backbone_widths
from megamem.chunk.machinery import Machinery
from megamem.chunk.side_stream import HIGH_PRIORITY, SideStream
from megamem.initialisation.initialise import initialise
from megamem.model import MemoryGPTModel
from megamem.parameters.declaration import Copy, GroupName, ReducedOver, declare, is_declared
from megamem.parameters.trained_part import TrainedPart
from parallel.context_ways import attention_core
from parallel.groups import ParallelGroups
from parallel.halo import halo_of, hidden_halo
from parallel.layout import padded_size
from parallel.pipeline_layout import chunks_of_stage
from parallel.sharded_bank import FetchRows, make_bank
from pretrain.config.context_ways import context_way
from pretrain.config.overlap import memory_runs_beside
from pretrain.config.schema import RunConfig
from pretrain.config.updates import has_bf16_gradients
from pretrain.engine.megatron import ddp_config, parameter_dtype, run_chunks, transformer_config
from pretrain.engine.parts import take_over_parts
from pretrain.engine.tables.bf16_gradients import add_tables
from pretrain.engine.tables.gradient_timing import add_after_last_lookup, add_beside_backward, make_gradient_stream
from pretrain.engine.tables.row_gradients import apart_from_ddp, count_repeats
from pretrain.engine.tables.stored_tables import StoredTables
from pretrain.engine.weight_gathering import wait_before_memories
from pretrain.errors import ConfigError

T = TypeVar("T")


def build_chunks(
    config: RunConfig, groups: ParallelGroups, *, vocab_size: int, dtype: torch.dtype | None = None
) -> list[MemoryGPTModel]:
    """This rank's bare model chunks (one, or one per virtual stage), with initial weights: for a run that starts.

    See `build_unset_chunks` for arguments and errors.
    """
    chunks = build_unset_chunks(config, groups, vocab_size=vocab_size, dtype=dtype)
    try:
        # Some tables' deviation is of how many rows they have.
        initialise(chunks, replace(config.model, vocab_size=vocab_size), seed=config.seed)
    except ValueError as error:
        # Of a file that initial values come from.
        raise ConfigError(str(error)) from error
    for chunk in chunks:
        chunk.weights_are_set = True
    return chunks


def build_unset_chunks(
    config: RunConfig,
    groups: ParallelGroups,
    *,
    vocab_size: int,
    dtype: torch.dtype | None = None,
    kernels: Kernels | None = None,
    fetch_rows: FetchRows | None = None,
) -> list[MemoryGPTModel]:
    """This rank's bare model chunks without weights: they refuse to train before a checkpoint has filled them.

    Args:
        vocab_size: token ids, before padding.
        dtype: overrides the run's precision (tests run in fp64).
        kernels: instead of those that `train.kernels` chooses for this machine (dry runs are for another one).
        fetch_rows: instead of tables that are part of the model, for one that is only read.

    Raises:
        ValueError: a memory bank would be split over chunks, or Transformer Engine is asked for and absent.
        ConfigError: this machine cannot run the memory kernels that were asked for.
    """
    layout = config.parallel
    try:
        # Tables may be as large as the vocabulary.
        model = replace(config.model, vocab_size=vocab_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    dtype = dtype or parameter_dtype(config)
    megatron_config = transformer_config(config, dtype=dtype, on_gpu=groups.on_gpu)
    machinery = _machinery(config, groups, kernels, fetch_rows)
    chunks: list[MemoryGPTModel] = []
    of_stage = chunks_of_stage(run_chunks(config), pipeline=layout.pipeline, pipeline_rank=groups.pipeline_rank)
    for index, chunk in enumerate(of_stage):
        built = MemoryGPTModel(
            megatron_config,
            model,
            machinery,
            layers=chunk.layers,
            has_embedding=chunk.has_embedding,
            has_loss=chunk.has_loss,
            padded_vocab_size=padded_size(vocab_size, model.vocab_size_multiple),
            loss_chunk_tokens=config.train.loss_chunk_tokens,
            recompute_streams=config.train.recompute_streams,
            separate_documents=config.data.documents == "separate",
            vp_stage=index if layout.virtual_pipeline > 1 else None,
            stage=Copy(groups.pipeline_rank, layout.pipeline),
            earlier=tuple(chunks),
            seed=config.seed,
        )
        built.model_type = ModelType.encoder_or_decoder
        _declare_megatron(built)
        set_backbone_widths(built)
        built.train_only(TrainedPart.of(model, config.optimizer.trained))
        chunks.append(built)
    return chunks


def _machinery(
    config: RunConfig, groups: ParallelGroups, kernels: Kernels | None, fetch_rows: FetchRows | None
) -> Machinery:
    """See `build_unset_chunks` for arguments and errors."""
    kernels = kernels or memory_kernels(config, on_gpu=groups.on_gpu)
    folder = config.optimizer.table_folder
    home = None if folder is None or fetch_rows is not None else StoredTables(Path(folder), groups.device)
    return Machinery(
        groups=groups.megatron,
        make_bank=partial(
            make_bank,
            kernels=kernels,
            groups=groups.megatron,
            row_parts=config.parallel.memory_rows,
            fetch_rows=fetch_rows,
            home=home,
        ),
        attention_core=attention_core(groups.megatron, context_way(config)),
        norm=ApexRMSNorm if "norms" in config.train.apex else RMSNorm,
        kernels=kernels,
        side_stream=_side_stream(config, groups),
        token_halo=halo_of(groups.megatron.cp, tensor=1),
        hidden_halo=hidden_halo(groups.megatron),
    )


def memory_kernels(config: RunConfig, *, on_gpu: bool) -> Kernels:
    """The kernels that the configuration asks for, compiled if need be.

    Raises:
        ConfigError: this machine cannot run the kernels.
    """
    kernels = config.train.kernels
    if config.model.memory is None and not on_gpu and kernels in ("auto", "cpu"):
        # The backbone has no C++: without a memory there is nothing to compile.
        kernels = "torch"
    try:
        return select_kernels(kernels, device_type="cuda" if on_gpu else "cpu")
    except KernelUnavailableError as error:
        raise ConfigError(f"train.kernels is {kernels}: {error}") from error


def _side_stream(config: RunConfig, groups: ParallelGroups) -> SideStream:
    """A CUDA stream for lookups in split tables; none on the CPU, where work is done when a call returns.

    A memory is a chain of short kernels that wait for each other and for other ranks, a feed-forward a few long
    products. So the chain's next kernel gets the first multiprocessor that is free, and the products fill its gaps.
    """
    if not groups.on_gpu or not memory_runs_beside(config):
        return SideStream(None)
    return SideStream(torch.cuda.Stream(groups.device, priority=HIGH_PRIORITY))


def _declare_megatron(chunk: MemoryGPTModel) -> None:
    """Declare the parameters of Megatron's own modules and of Transformer Engine's, which nobody here creates."""
    matrices = backbone_matrices(chunk)
    for module in chunk.modules():
        if type(module).__module__.split(".")[0] not in ("megatron", "transformer_engine"):
            continue
        for parameter in module.parameters(recurse=False):
            # A mixture declares its experts.
            if not is_declared(parameter):
                group: GroupName = "backbone" if parameter.dim() > 1 else "backbone_no_decay"
                declare(
                    parameter,
                    group,
                    reduced_over=ReducedOver.DATA,
                    tensor_dim=_split_dim(module),
                    matrices=matrices.get(parameter),
                )


def _split_dim(module: nn.Module) -> int | None:
    """The dimension in which tensor-parallel ranks split the weight of one of Megatron's linears or embeddings.

    Megatron says so inside its own weight initialisation, which we do not run; Transformer Engine's modules say it
    themselves.
    """
    if isinstance(module, RowParallelLinear):
        return 1
    return 0 if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) else None


def _weakly(method: Callable[[], T]) -> Callable[[], T]:
    """The method without holding its object: a config outlives its model."""
    weak = weakref.WeakMethod(method)

    def call() -> T:
        living = weak()
        assert living is not None
        return living()

    return call


def wrap_chunks(
    chunks: Sequence[MemoryGPTModel], config: RunConfig, groups: ParallelGroups
) -> list[DistributedDataParallel]:
    """Put the chunks under bf16 conversion (if they are bf16) and Megatron's DDP."""
    wrapped = []
    gradient_stream = make_gradient_stream(config, groups)
    for index, chunk in enumerate(chunks):
        module = Float16Module(chunk.config, chunk) if chunk.config.bf16 else chunk
        with apart_from_ddp(chunk, config) as tables:
            wrapped.append(
                DistributedDataParallel(
                    chunk.config, ddp_config(config), module, disable_bucketing=index > 0, pg_collection=groups.megatron
                )
            )
        if has_bf16_gradients(config.optimizer):
            add_tables(wrapped[-1], tables)
        take_over_parts(wrapped[-1])
        if config.parallel.overlap_param_gather:
            wait_before_memories(wrapped[-1], chunk)
        if gradient_stream is None:
            add_after_last_lookup(chunk)
        else:
            add_beside_backward(wrapped[-1], chunk, gradient_stream)
    count_repeats(chunks)
    if config.parallel.overlap_grad_reduce:
        # Only the last microbatch's backward pass makes gradients that are complete: the schedules ask for this.
        no_sync = [_weakly(chunk.no_sync) for chunk in wrapped]
        for chunk in wrapped:
            chunk.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    # No broadcast from the first replica: all replicas drew the same weights.
    return wrapped
