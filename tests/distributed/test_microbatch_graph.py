"""A microbatch's passes replayed, against Megatron's schedule: the same bits on every rank; and that nothing a replay reads
has moved between two steps, which no CPU would notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_runs import PRIVATE, SHARED, VOCAB_SIZE, TinyRun, tiny_run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megamem.config.model import MultiTokenConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.move.config import MoveConfig
from megamem.residual_streams.config import ResidualStreamsConfig
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.engine.chunks import unwrap
from pretrain.engine.microbatch_graph import Capture, MicrobatchGraph, Work
from tests.distributed.conftest import RunRanks
from tests.rotation import in_rotation

# The second replays with weights that the first one moved.
STEPS = 2


def with_model(config: RunConfig, **model: Any) -> RunConfig:
    return replace(config, model=replace(config.model, **model))


def with_memory(config: RunConfig, **memory: Any) -> RunConfig:
    assert config.model.memory is not None
    return with_model(config, memory=replace(config.model.memory, **memory))


CASES: dict[str, RunConfig] = {
    "shared tables": SHARED,
    "private tables": PRIVATE,
    "dense": with_model(SHARED, memory=None),
    "losses of memories": with_memory(
        SHARED, tucker_penalty_weight=0.1, tucker_penalty_margin=0.01, key_balance_weight=0.2
    ),
    "further tokens": with_model(PRIVATE, multi_token_prediction=MultiTokenConfig(depth=2)),
    "streams, mixed again": replace(
        with_model(SHARED, num_layers=2, residual_streams=ResidualStreamsConfig(count=2, iterations=1)),
        train=replace(SHARED.train, sequence_length=8, recompute_streams=2),
    ),
    "loss in chunks": replace(SHARED, train=replace(SHARED.train, loss_chunk_tokens=15)),
    "split tables": replace(SHARED, parallel=ParallelConfig(memory=2, overlap_memory=False)),
    "Memory+": with_model(SHARED, memory=MemoryPlusConfig(num_keys=12, key_dim=8, value_dim=32, top_k=4)),
    "MoVE": with_model(SHARED, memory=MoveConfig(value_dim=16, num_gate_heads=2)),
    "Engram": with_model(
        SHARED,
        memory=EngramConfig(heads_per_order=2, rows_per_head=40, value_dim=6, vocab_size=VOCAB_SIZE, boundary_id=7),
    ),
}
OF_SHARE = in_rotation(list(CASES))


def one_by_one(config: RunConfig) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False))


def replayed_on_a_cpu(work: Work) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
    """CUDA's capture, by doing the work again: results stay where they are."""
    results = work()

    def replay() -> None:
        for kept, new in zip(results, work(), strict=True):
            kept.copy_(new)

    return results, replay


def with_graph(run: TinyRun, capture: Capture = replayed_on_a_cpu) -> MicrobatchGraph:
    (chunk,) = run.chunks
    run.run.graph = MicrobatchGraph(chunk, capture)
    return run.run.graph


def weights(run: TinyRun) -> list[Tensor]:
    return [parameter.detach().clone() for chunk in run.bare for parameter in chunk.parameters()]


@pytest.fixture(scope="module")
def compared(run_ranks: RunRanks) -> list[dict[str, tuple[bool, bool, int]]]:
    def main() -> dict[str, tuple[bool, bool, int]]:
        found = {}
        for name in OF_SHARE:
            config = CASES[name]
            with tiny_run(one_by_one(config)) as run:
                rows, after = run.train(STEPS), weights(run)
            calls = 0

            def counted(work: Work) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
                results, replay = replayed_on_a_cpu(work)

                def counting() -> None:
                    nonlocal calls
                    calls += 1
                    replay()

                return results, counting

            with tiny_run(one_by_one(config)) as run:
                with_graph(run, counted)
                again, and_after = run.train(STEPS), weights(run)
            same = all(torch.equal(a, b) for a, b in zip(after, and_after, strict=True))
            found[name] = (rows == again, same, calls)
        return found

    return run_ranks(main, 2, timeout_s=200)


@pytest.mark.parametrize("name", OF_SHARE)
def test_replays_have_the_bits_of_the_schedule(
    compared: Sequence[dict[str, tuple[bool, bool, int]]], name: str
) -> None:
    train = CASES[name].train
    for of_rank in compared:
        assert of_rank[name] == (True, True, STEPS * train.global_batch_size // train.micro_batch_size // 2)


class ReadsFromBefore(TorchDispatchMode):
    """Collector of addresses that operations read and did not write before in the same pass."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()
        self._made: set[int] = set()
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [
            each
            for each in tree_leaves((args, kwargs or {}))
            if isinstance(each, Tensor) and each.layout == torch.strided
        ]
        if func is torch.ops.aten.lift_fresh.default:
            # A number of Python's, which a graph holds as it is.
            given = []
        self.read |= {each.untyped_storage().data_ptr() for each in given if each.numel()} - self._made
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if (
                isinstance(each, Tensor)
                and each.layout == torch.strided
                and each.untyped_storage().data_ptr() not in self.read
            ):
                self._made.add(each.untyped_storage().data_ptr())
                # Else its address would be another tensor's next.
                self._alive.append(each.untyped_storage())
        return out


def watched(seen: list[set[int]]) -> Capture:
    """A capture whose replays each add to `seen` what they read from before."""

    def capture(work: Work) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
        results, replay = replayed_on_a_cpu(work)

        def watching() -> None:
            with ReadsFromBefore() as reads:
                replay()
            seen.append(reads.read)

        return results, watching

    return capture


@pytest.mark.parametrize("name", OF_SHARE)
def test_what_a_replay_reads_stays_where_it_is(run_ranks: RunRanks, name: str) -> None:
    """Steps and evaluations lie between two replays: whatever they make anew, a graph would not see."""

    def main() -> tuple[int, set[int]]:
        seen: list[set[int]] = []

        with tiny_run(one_by_one(CASES[name])) as run:
            with_graph(run, watched(seen))
            run.train(3)
        return len(seen), set.union(*seen) - set.intersection(*seen)

    num_ranks = CASES[name].parallel.memory
    for count, moved in run_ranks(main, num_ranks):
        assert count == 6 // num_ranks
        assert not moved


def test_a_sum_that_is_made_anew_is_seen(run_ranks: RunRanks) -> None:
    def main() -> set[int]:
        seen: list[set[int]] = []

        with tiny_run(one_by_one(CASES["losses of memories"])) as run:
            with_graph(run, watched(seen))
            (model,) = map(unwrap, run.chunks)
            begin = model.begin_step
            kept: list[Tensor] = []

            def anew() -> None:
                begin()
                for layer in model.memory_layers:
                    assert layer.losses is not None
                    kept.append(layer.losses.sums)
                    layer.losses.sums = torch.zeros_like(layer.losses.sums)

            with patch.object(model, "begin_step", anew):
                run.train(3)
        return set.union(*seen) - set.intersection(*seen)

    assert run_ranks(main, 1)[0]


def test_a_step_that_is_observed_takes_the_schedule(run_ranks: RunRanks) -> None:
    def main() -> list[bool]:
        with tiny_run(one_by_one(SHARED)) as run:
            graph = with_graph(run)
            before = graph.holds_this_step
            layer = unwrap(run.chunks[0]).memory_layers[0]
            layer.usage = object()
            return [before, graph.holds_this_step]

    assert run_ranks(main, 1) == [[True, False]]
