"""A world of any number of ranks with one process in it: Megatron's groups, and no one at their other ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.groups import ParallelGroups, ParallelSizes, initialise_groups
from parallel.machine.cpu import cuda_on_cpu
from pretrain.planning.dryrun.experts import DISPATCHER, balanced
from pretrain.planning.dryrun.gpu import DEVICE, StandInGpu
from pretrain.planning.dryrun.recorder import Recorder
from pretrain.planning.dryrun.tables import DryTables


def _keep_converted(parameter: Tensor, converted: Tensor) -> None:
    """Swap nothing in `Module.bfloat16`: weights are made in the run's precision."""
    assert parameter.dtype == converted.dtype


# Calls that fake tensors cannot answer, beyond the stand-in for CUDA, each with its caller. The first are of random
# states, which nothing in a step reads.
_ANSWERS: dict[str, Any] = {
    # Recomputation, and tensor-parallel regions.
    "torch.get_rng_state": lambda: None,
    "torch.set_rng_state": lambda _: None,
    "torch.cuda.get_rng_state": lambda *_, **__: None,
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": lambda *_, **__: None,
    "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork": lambda *_: nullcontext(),
    # Megatron's Float16Module: swapping fake tensors is refused where somebody refers to them weakly.
    "torch.utils.swap_tensors": _keep_converted,
    # Tables that are stepped on the host: by operations of PyTorch's, which know tensors without data.
    "pretrain.engine.tables.value_offload.has_deepspeed": lambda: False,
    # A mixture's dispatcher, which counts where the router sends tokens.
    DISPATCHER: balanced,
    # Tables in files, of which there are none.
    "pretrain.engine.build.StoredTables": DryTables,
}


# Readers' names of Megatron's groups.
_AXES = {
    "tp": "tensor",
    "cp": "context",
    "pp": "pipeline",
    "dp": "data",
    "dp_cp": "data",
    "ep": "memory",
    "tp_ep": "memory",
    "expt_dp": "table replicas",
    "embd": "embeddings",
    "tp_cp": "tensor x context",
    "tp_dp_cp": "stage",
    "mp": "model",
}


def names_of_groups(groups: ParallelGroups) -> dict[str, str]:
    """Readers' name of each group, by PyTorch's name of it."""
    world = dist.group.WORLD
    assert world is not None
    named = {attribute: getattr(groups.megatron, attribute, None) for attribute in _AXES}
    of_axes = {group.group_name: _AXES[attribute] for attribute, group in named.items() if group is not None}
    return {world.group_name: "world", groups.table_columns.group_name: "table columns", **of_axes}


@contextmanager
def fake_rank(
    rank: int, world_size: int, sizes: ParallelSizes, *, seed: int, gpu: StandInGpu | None = None
) -> Iterator[ParallelGroups]:
    """One rank's groups in a world of so many, in a process without any world; until the block ends.

    Args:
        rank: place of the rank among `world_size`.
        world_size: ranks in all.
        sizes: the layout, which must fit.
        seed: seed of Megatron's random states.
        gpu: the rank's; None: it computes on the CPU.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with cuda_on_cpu(), _replaced({} if gpu is None else gpu.redirections()):
            device = torch.device("cpu") if gpu is None else DEVICE
            yield initialise_groups(sizes, device=device, timeout_minutes=1, seed=seed)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def _replaced(answers: Mapping[str, Any]) -> Iterator[None]:
    """Put these in the places of what they are named for."""
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(name, answer))
        yield


@contextmanager
def without_data(
    groups: ParallelGroups, *, experts_per_token: int = 0, gpu: StandInGpu | None = None
) -> Iterator[Recorder]:
    """Tensors without data, collectives without peers, and a recorder of both; within `fake_rank`, whose groups and GPU
    these are.

    Args:
        experts_per_token: experts of a mixture that every token is sent to; 0 where there is none.
    """
    recorder = Recorder(names_of_groups(groups), experts_per_token=experts_per_token, gpu=gpu)
    with FakeTensorMode(allow_non_fake_inputs=True), _replaced(_ANSWERS), recorder.recording():
        yield recorder
