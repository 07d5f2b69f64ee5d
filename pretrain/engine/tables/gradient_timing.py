"""Times at which the gradients of tables are added up: beside the rest of backward, or after the last lookup of a pass.

Megatron reduces a bank's gradients when autograd has been through all lookups of it. On a stream of their own they are
then asked for, and not yet there. Without such a stream nothing is gained by an early start, and lookups of all layers that
share a table are added up in one.
"""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel

from kernels.common.gradient_stream import GradientStream
from kernels.common.main_grad import MainGradient
from kernels.common.table_gradient import give_gradient
from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from parallel.machine.multiprocessors import context_of_share
from pretrain.config.overlap import memory_runs_beside
from pretrain.config.schema import RunConfig
from pretrain.engine.tables.row_gradients import row_gradient_of
from pretrain.errors import ConfigError


def make_gradient_stream(config: RunConfig, groups: ParallelGroups) -> GradientStream | None:
    """A CUDA stream for gradients of tables, where memories have one: without their priority, since nobody waits.

    Raises:
        ConfigError: the stream cannot have the share of the GPU that is asked for.
    """
    if not groups.on_gpu or not memory_runs_beside(config):
        return None
    share = config.parallel.gradient_sm_share
    if share == 1:
        return GradientStream(torch.cuda.Stream(groups.device))
    try:
        context = context_of_share(groups.device, share)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return GradientStream(context.Stream(), of=context)


def add_after_last_lookup(model: MemoryGPTModel) -> None:
    """Have the lookups of a chunk's tables added up once per table and backward pass, if their gradients are DDP's."""
    for bank in model.banks.values():
        for table in bank.parameters():
            if hasattr(table, "main_grad"):
                gradient = MainGradient(table)
                gradient.wait_for_last_lookup()
                give_gradient(table, gradient)


def add_beside_backward(wrapped: DistributedDataParallel, model: MemoryGPTModel, stream: GradientStream) -> None:
    """Have the gradients of a chunk's tables added up on this stream."""
    for bank in model.banks.values():
        for table in bank.parameters():
            if row_gradient_of(table) is None:
                give_gradient(table, MainGradient(table, stream))
    for part in wrapped.expert_parallel_bucket_groups:
        part.stream = stream
