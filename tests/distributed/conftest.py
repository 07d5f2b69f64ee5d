"""Ranks for the distributed tests: forked from this process, which pays for the imports once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol, TypeVar

import pytest
import torch

from parallel.processes.launch import RanksInterrupted
from parallel.processes.ranks import current_ranks
from tests.deadline import launch_within
from tests.small_chunks import OF_STEPS, small
from tests.warm import import_kernels_and_layers

T = TypeVar("T")

# Imported before the first fork: every rank needs them, and takes seconds to import them by itself.
WARM_MODULES = (
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)


class RunRanks(Protocol):
    """Type of the `run_ranks` fixture."""

    def __call__(self, fn: Callable[[], T], num_ranks: int, timeout_s: float = 120) -> list[T]: ...


@pytest.fixture(scope="module", autouse=True)
def _several_chunks_of_a_step() -> Iterator[None]:
    """Make every step reach a second window."""
    with small(OF_STEPS):
        yield


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    """A function that runs `fn` on gloo ranks and returns their results by rank.

    `fn` may be a closure; it takes nothing, knows its rank from `torch.distributed`, and returns something picklable.
    Setting up Megatron's groups costs far more than the fork, so let one `fn` go through many cases and return one
    result per case. A failed rank fails the test with its traceback; a hang fails it with the stacks of all ranks.
    """
    for module in WARM_MODULES:
        importlib.import_module(module)
    import_kernels_and_layers()

    def run(fn: Callable[[], T], num_ranks: int, timeout_s: float = 120) -> list[T]:
        def main() -> T:
            ranks = current_ranks()
            assert ranks is not None
            torch.distributed.init_process_group(
                "gloo",
                init_method=ranks.init_method,
                rank=ranks.rank,
                world_size=ranks.world_size,
                # Longer than that of `launch_within`, which shows where every rank stands.
                timeout=timedelta(seconds=10 * timeout_s),
            )
            result = fn()
            if torch.distributed.is_initialized():
                # A rank that leaves early would cut off those that are still in their last collective.
                torch.distributed.barrier()
                torch.distributed.destroy_process_group()
            return result

        try:
            return launch_within(main, num_ranks, timeout_s=timeout_s)
        except RanksInterrupted as interruption:
            # Ctrl-C is meant for the whole session, not for one test.
            raise KeyboardInterrupt from interruption

    return run
