"""Starting torch.distributed and Megatron's parallel state: the one place that reads `parallel_state`.

Ranks are laid out as Megatron does by default, tensor fastest, then context, data and pipeline. The memory group of G
ranks is Megatron's expert-parallel group: G consecutive ranks of one pipeline stage, whatever mix of tensor, context
and data parallelism they are; parameters with `allreduce = False` are reduced over its replicas.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from parallel.machine.cpu import cuda_on_cpu, one_group_per_ranks
from parallel.machine.devices import gpu_of
from parallel.machine.network_threads import lower_network_threads
from parallel.processes.failure_watch import failures_shared
from parallel.processes.ranks import RankEnvironment, said_by_variables_alone

_FIRST = ("tp", "cp", "dp_cp", "ep_dp")
"""Megatron's names of groups whose collectives run beside products: tensor, context, and both kinds of replicas.

Their kernels' blocks are placed before those of products that wait for a multiprocessor, so a collective that was
launched first is not put off to the end of the product beside it (docs/decisions.md)."""
_SILENT_WAIT_S = 20.0
"""Ranks of a busy cluster come to their meeting within so long."""


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the model-parallel axes; data parallelism takes what is left."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    memory: int = 1
    memory_rows: int = 1


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's place on every axis, and the groups it talks in.

    Attributes:
        megatron: Megatron's own collection, to hand to its modules.
        data_rank: this rank's data-parallel position.
        data_size: number of data-parallel replicas.
        pipeline_rank: this rank's stage.
        table_columns: ranks with other columns of the rows of tables that this rank has.
        device: device on which this rank computes.
    """

    megatron: ProcessGroupCollection
    table_columns: dist.ProcessGroup
    data_rank: int
    data_size: int
    pipeline_rank: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        """True if this rank computes on a GPU, or on what stands for one."""
        return self.device.type != "cpu"

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """True if this rank prints and writes logs."""
        return self.rank == 0


@contextmanager
def meeting(ranks: RankEnvironment, *, timeout_minutes: float) -> Iterator[dist.Store]:
    """The store where the ranks of a job meet; until the block ends, the failure of one is known to all.

    Args:
        ranks: this process's place among them.
        timeout_minutes: longest wait for the others.
    """
    timeout = timedelta(minutes=timeout_minutes)
    with _saying_who_waits(ranks):
        store, _, _ = next(dist.rendezvous(ranks.init_method, ranks.rank, ranks.world_size, timeout=timeout))
    store.set_timeout(timeout)
    alone = ranks.are_watched or ranks.world_size == 1
    with nullcontext() if alone else failures_shared(store, ranks.rank, ranks.world_size):
        yield store


@contextmanager
def _saying_who_waits(ranks: RankEnvironment) -> Iterator[None]:
    """If the block takes long, say once what it waits for."""

    def say() -> None:
        where = "{}:{}".format(*address) if (address := ranks.address()) else ranks.init_method
        text = f"rank {ranks.rank} waits for the other {ranks.world_size - 1} ranks to come to {where}"
        print("; ".join(filter(None, (text, said_by_variables_alone()))), file=sys.stderr, flush=True)

    timer = threading.Timer(_SILENT_WAIT_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def parallel_context(
    sizes: ParallelSizes, ranks: RankEnvironment, store: dist.Store, *, timeout_minutes: float, seed: int
) -> Iterator[ParallelGroups]:
    """Join the world, build the groups, and leave in order.

    On a GPU machine this is NCCL on the device of `ranks.local_rank`; elsewhere gloo under
    `parallel.machine.cpu.cuda_on_cpu`. CUDA's environment variables must be settled (`parallel.machine.environment`).

    Args:
        sizes: the layout; the product of tensor, pipeline and context must divide the number of ranks.
        ranks: this process's place among them.
        store: meeting place of the ranks.
        timeout_minutes: longest wait in a collective.
        seed: seed of Megatron's random states.
    """
    with ExitStack() as stack:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cpu")
        if on_gpu:
            device = torch.device("cuda", gpu_of(ranks.local_rank, torch.cuda.device_count()))
            torch.cuda.set_device(device)
        else:
            stack.enter_context(cuda_on_cpu())
        # Without `device_id`: with it, every one of the hundreds of groups would be split off the world by all ranks at
        # once, instead of being connected by its members when it is first used, and messages between stages that are
        # not sent as one batch would wait for each other.
        dist.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("world", store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(minutes=timeout_minutes),
        )
        yield initialise_groups(sizes, device=device, timeout_minutes=timeout_minutes, seed=seed)
        # Not after an error: the other ranks may be anywhere, and leaving would wait for them. A rank that left early
        # would cut off those that are still in their last collective.
        barrier()
        dist.destroy_process_group()


def initialise_groups(
    sizes: ParallelSizes, *, device: torch.device, timeout_minutes: float, seed: int
) -> ParallelGroups:
    """Megatron's parallel state over the world that is already joined, as explicit groups."""
    with one_group_per_ranks() if dist.get_backend() == "gloo" else nullcontext():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.memory,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=max(1, round(timeout_minutes)),
            create_gloo_process_groups=False,
            high_priority_stream_groups=list(_FIRST) if dist.get_backend() == "nccl" else None,
        )
        megatron = ProcessGroupCollection.use_mpu_process_groups()
        table_columns = _column_group(sizes, megatron, timedelta(minutes=timeout_minutes))
    lower_network_threads()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ParallelGroups(
        megatron=megatron,
        table_columns=table_columns,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        device=device,
    )


def _column_group(sizes: ParallelSizes, megatron: ProcessGroupCollection, timeout: timedelta) -> dist.ProcessGroup:
    """The memory group, or of each of its parts of rows the consecutive ranks that have it."""
    if sizes.memory_rows == 1:
        return megatron.ep
    size = sizes.memory // sizes.memory_rows
    ranks = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
    assert own is not None
    return own


def barrier() -> None:
    """Wait for all ranks.

    The world has no device (see `parallel_context`): where a barrier is its first collective, NCCL would guess the GPU
    from the rank, and warn that a wrong guess can hang.
    """
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def close_groups() -> None:
    """Close all groups but the world. Collective.

    Megatron forgets its groups without closing them, and each keeps connections and, with gloo, three threads, one of
    which wakes up a hundred times a second. They end when nobody refers to a group any longer.
    """
    # A rank that closed early would cut off those that are still in their last collective.
    barrier()
    parallel_state.destroy_model_parallel()
    world = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)
    # Models and optimizers hold groups, and are cycles.
    gc.collect()
