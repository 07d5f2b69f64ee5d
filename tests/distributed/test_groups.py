"""Groups of a layout's ranks: Megatron's own, asked of every rank of 16 without starting them. Groups end, too."""

from __future__ import annotations

import gc
import inspect
import os
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.groups import ParallelSizes, initialise_groups
from parallel.machine.cpu import cuda_on_cpu
from tests.deadline import launch_within
from tests.distributed.tiny_runs import SHARED, joined, on, tiny_run

WORLD, STAGE = 16, 8
MEMORY_SIZES = (2, 4, 8)
NAMES = ("tp", "cp", "ep", "expt_dp", "dp_cp", "tp_cp", "tp_dp_cp")


def groups_of_every_rank(memory: int) -> list[dict[str, list[int]]]:
    """Global ranks in the groups of each rank, on tensor 2 x context 2 x data 2 x pipeline 2."""
    sizes = ParallelSizes(tensor=2, context=2, pipeline=2, memory=memory)
    found = []
    for rank in range(WORLD):
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        with cuda_on_cpu():
            megatron = initialise_groups(sizes, device=torch.device("cpu"), timeout_minutes=1, seed=1).megatron
            found.append({name: dist.get_process_group_ranks(getattr(megatron, name)) for name in NAMES})
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def by_size() -> dict[int, Any]:
    # In a fork: a process can have but one world.
    (found,) = launch_within(
        lambda: {memory: groups_of_every_rank(memory) for memory in MEMORY_SIZES}, 1, timeout_s=120
    )
    return found


@pytest.mark.parametrize("memory", MEMORY_SIZES)
def test_a_memory_group_is_consecutive_ranks_over_tensor_context_and_data(by_size: Any, memory: int) -> None:
    for rank, groups in enumerate(by_size[memory]):
        first, stage = rank // memory * memory, rank // STAGE * STAGE
        assert groups["ep"] == list(range(first, first + memory))
        # The same columns are everywhere in the stage at the same place of a group.
        assert groups["expt_dp"] == list(range(stage + rank % memory, stage + STAGE, memory))


@pytest.mark.parametrize("memory", MEMORY_SIZES)
def test_the_other_groups_do_not_depend_on_it(by_size: Any, memory: int) -> None:
    for rank, groups in enumerate(by_size[memory]):
        stage = rank // STAGE * STAGE
        tensor, context, data = rank % 2, rank // 2 % 2, rank // 4 % 2
        place = stage + 4 * data
        assert groups["tp"] == [place + 2 * context, place + 2 * context + 1]
        assert groups["cp"] == [place + tensor, place + tensor + 2]
        assert groups["tp_cp"] == list(range(place, place + 4))
        assert groups["dp_cp"] == list(range(stage + tensor, stage + STAGE, 2))
        assert groups["tp_dp_cp"] == list(range(stage, stage + STAGE))


@pytest.mark.parametrize(("backend", "first"), [("nccl", ["tp", "cp", "dp_cp", "ep_dp"]), ("gloo", None)])
def test_collectives_beside_products_go_first_on_a_gpu(
    backend: str, first: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = MagicMock()
    monkeypatch.setattr("parallel.groups.dist.get_backend", lambda: backend)
    monkeypatch.setattr("parallel.groups.parallel_state", state)
    monkeypatch.setattr("parallel.groups.tensor_parallel", MagicMock())
    monkeypatch.setattr("parallel.groups.ProcessGroupCollection", MagicMock())
    initialise_groups(ParallelSizes(tensor=2), device=torch.device("cpu"), timeout_minutes=1, seed=1)
    assert state.initialize_model_parallel.call_args.kwargs["high_priority_stream_groups"] == first
    # Megatron ignores a name that it does not know.
    makes_groups = inspect.getsource(parallel_state.initialize_model_parallel)
    assert all(f'get_nccl_options("{name}"' in makes_groups for name in first or ())


def test_axes_of_the_same_ranks_share_a_group_of_gloos(run_ranks: Any) -> None:
    def ranks_of_groups() -> list[list[int]]:
        with joined(on(SHARED, tensor=2)):
            return sorted(map(list, dist.distributed_c10d._world.pg_group_ranks.values()))

    # One of each rank, one of both, and the world.
    assert run_ranks(ranks_of_groups, 2) == [[[0], [0, 1], [0, 1], [1]]] * 2


@pytest.mark.skipif(torch.__version__ < "2.13", reason="gloo's threads have names from torch 2.13 on")
def test_threads_that_receive_leave_cores_to_others(run_ranks: Any) -> None:
    def niceness() -> dict[bool, set[int]]:
        found: dict[bool, set[int]] = {True: set(), False: set()}
        with joined(on(SHARED, tensor=2)):
            for task in Path("/proc/self/task").iterdir():
                receives = (task / "comm").read_text().startswith("gloo_tcp")
                found[receives].add(
                    os.getpriority(os.PRIO_PROCESS, int(task.name)) - os.getpriority(os.PRIO_PROCESS, 0)
                )
        return found

    for of_rank in run_ranks(niceness, 2):
        (receiving,), others = of_rank[True], of_rank[False]
        assert receiving > 0
        assert others == {0}


def test_groups_that_are_closed_leave_no_threads(run_ranks: Any) -> None:
    """Three of gloo's per group, which wake up again and again, would be left by every layout of a benchmark.

    A run that is still named holds its groups: they end with those of the next layout.
    """

    def threads_after_each_of_four_layouts() -> list[int]:
        # Only what is collected on purpose.
        gc.disable()
        found = []
        for _ in range(4):
            with tiny_run(SHARED) as run:
                run.train(1)
            del run
            found.append(len(os.listdir("/proc/self/task")))
        return found

    for _, *later in run_ranks(threads_after_each_of_four_layouts, 2):
        # One group of each layout stays with Megatron, out of two.
        assert all(after - before <= 3 for before, after in pairwise(later))
