"""Order of a step's accesses on a GPU's streams: none is left to chance, and what is, when it is planted, is told with
both lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from megamem.config.model import ModelConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from tests.deadline import launch_within
from tests.rotation import in_rotation, named_in_rotation

ALONE = RunConfig(
    model=ModelConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=64,
        vocab_size=64,
        memory=UltraMemV2Config(num_keys=16, value_dim=16, pre_value_dim=8, top_k=4),
    ),
    parallel=ParallelConfig(memory=2),
    train=TrainConfig(sequence_length=32, micro_batch_size=1, global_batch_size=2, precision="bf16"),
)
RING = replace(ALONE, parallel=ParallelConfig(context=2, context_attention="ring", memory=2))
RECOMPUTED = replace(ALONE, train=replace(ALONE.train, recompute="full"))
OFFLOADED = replace(ALONE, optimizer=OptimizerConfig(value_offload="cpu"))
TWO_BATCHES = replace(ALONE, train=replace(ALONE.train, global_batch_size=4))
OF_FOUR = replace(ALONE, train=replace(ALONE.train, global_batch_size=4))
"""On four ranks, of which two have the same columns of tables: these are gathered, and their gradients reduced."""
DEEPER = replace(ALONE, model=replace(ALONE.model, num_layers=2))
LAYOUTS = {
    "tensor, pipeline": replace(DEEPER, parallel=ParallelConfig(tensor=2, pipeline=2, memory=2)),
    "interleaved": replace(
        ALONE,
        model=replace(ALONE.model, num_layers=4),
        parallel=ParallelConfig(pipeline=2, virtual_pipeline=2, memory=2, gradient_sm_share=0.5),
        train=replace(ALONE.train, global_batch_size=4),
    ),
    "ring": RING,
    "recomputed, offloaded": replace(RECOMPUTED, optimizer=OFFLOADED.optimizer),
}

PLACES = named_in_rotation(
    {"tensor, pipeline": (4, 3), "interleaved": (4, 1), "ring": (2, 1), "recomputed, offloaded": (2, 1)}, parts=2
)
"""Ranks in all, and the one that is run."""

Plant = Callable[[], AbstractContextManager[Any]]


def start(*, waits: bool = True, joins: bool = True, copies: bool = False) -> Plant:
    """`SideStream.start` without a wait, or of a copy that nobody keeps for it."""

    def start(self: Any, branch: Any, hidden: Any, inputs: Any) -> Any:
        import torch

        side = self._stream
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = branch(hidden, inputs)

        def join() -> Any:
            if joins:
                torch.cuda.current_stream().wait_stream(side)
            return out

        return join

    def start_with_copy(self: Any, branch: Any, hidden: Any, inputs: Any) -> Any:
        return start(self, branch, hidden.clone(), inputs)

    return lambda: patch("megamem.chunk.side_stream.SideStream.start", start_with_copy if copies else start)


@contextmanager
def weights_that_are_not_waited_for() -> Iterator[None]:
    with patch("pretrain.engine.weight_gathering._waiting_for", lambda *_: lambda *_: None):
        yield


@contextmanager
def messages_that_are_not_waited_for() -> Iterator[None]:
    with patch("parallel.context_ring._Transfer.received", lambda self: self._coming):
        yield


@contextmanager
def a_message_that_is_overwritten() -> Iterator[None]:
    from parallel.context_ring import _Transfer

    make = _Transfer.__init__

    def overwritten(self: Any, x: Any, group: Any) -> None:
        make(self, x, group)
        self._sent.zero_()

    with patch.object(_Transfer, "__init__", overwritten):
        yield


@contextmanager
def backward_on_a_stream_of_its_own() -> Iterator[None]:
    import torch

    from parallel.exchange import _Linear

    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return ctx.adjoint(grads[0]), None, None

    with patch.object(_Linear, "backward", staticmethod(backward)):
        yield


@contextmanager
def ids_gathered_on_another_stream() -> Iterator[None]:
    import torch

    from parallel.exchange import gather_ids

    def elsewhere(*arguments: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return gather_ids(*arguments)

    with patch("parallel.sharded_bank.gather_ids", elsewhere):
        yield


@contextmanager
def gradients_that_no_reduction_waits_for() -> Iterator[None]:
    with patch("kernels.common.gradient_stream.GradientStream.wait", lambda self: None):
        yield


@contextmanager
def gradients_released_without_a_wait() -> Iterator[None]:
    with patch("kernels.common.gradient_stream.GradientStream._release", lambda self: self._under_way.clear()):
        yield


def gradients_on_their_stream(*, waits: bool = True, holds: bool = True) -> Plant:
    """`GradientStream.add` without a wait for its operands, or of operands that nobody holds."""

    def add(self: Any, lookup: Any, gradient: Any) -> None:
        import torch

        if waits:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            lookup.add_to(gradient)
        if holds:
            done = self._stream.record_event()
            self._under_way.append(SimpleNamespace(caller=self._stream, done=done, lookup=lookup))

    return lambda: patch("kernels.common.gradient_stream.GradientStream.add", add)


@contextmanager
def a_batch_buffer_that_is_filled_again() -> Iterator[None]:
    import torch

    def on_device(batches: Any, device: Any) -> Any:
        buffers: dict[str, Any] = {}
        for batch in batches:
            for name, tensor in batch.items():
                buffers.setdefault(name, torch.empty_like(tensor).pin_memory()).copy_(tensor)
            yield {name: buffer.to(device, non_blocking=True) for name, buffer in buffers.items()}

    with patch("pretrain.planning.dryrun.rank.on_device", on_device):
        yield


@contextmanager
def windows_that_are_not_waited_for() -> Iterator[None]:
    with patch("pretrain.planning.dryrun.streams._Event.synchronize", lambda event: None):
        yield


@contextmanager
def windows_with_an_early_event() -> Iterator[None]:
    import torch

    from pretrain.engine.tables.value_offload import HostTables

    def fetch(self: Any, index: int) -> None:
        shard, window = self._windows[index]
        slot = self._slots[index % 2]
        with torch.cuda.stream(self._copies):
            slot.arrived.record(self._copies)
            slot.gradient[: window.stop - window.start].copy_(shard.gradient[window], non_blocking=True)

    with patch.object(HostTables, "_fetch", fetch):
        yield


@contextmanager
def windows_in_one_place() -> Iterator[None]:
    from pretrain.engine.tables.value_offload import HostTables

    make = HostTables.__init__

    def with_one(self: Any, *args: Any, **keywords: Any) -> None:
        make(self, *args, **keywords)
        self._slots = [self._slots[0]] * 2

    with patch.object(HostTables, "__init__", with_one):
        yield


def a_save_between_steps(*, waits: bool = True, completes: bool = True) -> Plant:
    """Weights copied into page-locked memory after a step, and written from there by the host beside the next."""

    @contextmanager
    def plant() -> Iterator[None]:
        import torch

        from pretrain.checkpoint.staging import StagingBuffer
        from pretrain.engine.step import train_step
        from pretrain.engine.weight_gathering import complete_weights

        buffer = StagingBuffer()

        def step_and_save(chunks: Any, *args: Any, **options: Any) -> None:
            train_step(chunks, *args, **options)
            if completes:
                complete_weights(chunks)
            synchronize = torch.cuda.synchronize if waits else lambda: None
            with patch("torch.cuda.synchronize", synchronize):
                copies = buffer.copy({name: weight for chunk in chunks for name, weight in chunk.named_parameters()})
            for copy in copies.values():
                copy.clone()

        with patch("pretrain.planning.dryrun.rank.train_step", step_and_save):
            yield

    return plant


def copies_that_wait_for_nobody(*, first: bool) -> Plant:
    """The stream of the windows does not wait for the gradients, or the step not for its weights."""

    @contextmanager
    def plant() -> Iterator[None]:
        from pretrain.planning.dryrun.streams import _Stream

        wait = _Stream.wait_stream

        def wait_stream(stream: Any, other: Any) -> None:
            default = stream._streams.default
            is_first, is_last = other is default, stream is default
            if not (is_first if first else is_last) or "1" in (stream.name + other.name):
                wait(stream, other)

        with patch.object(_Stream, "wait_stream", wait_stream):
            yield

    return plant


RUNS: tuple[tuple[RunConfig, int, tuple[tuple[str, Plant, str, str], ...]], ...] = (
    (ALONE, 2, (
        ("a wait left out before the memory", start(waits=False), "megamem/layers/tucker.py", "triton_rms_norm"),
    )),
    (OF_FOUR, 4, (
        ("a wait left out behind the memory", start(joins=False), "megamem/blocks/memory_sites.py", "megamem/layers/tucker.py"),
        ("tables that are not there", weights_that_are_not_waited_for, "kernels/", "weight_gathering.py"),
    )),
    (RECOMPUTED, 2, (
        ("an input freed early", start(copies=True), "freed", "ultramem_v2/layer.py"),
    )),
    (TWO_BATCHES, 2, (
        ("backward without a wait", backward_on_a_stream_of_its_own, "parallel/exchange.py", "backward of"),
        ("a batch overwritten before it left", a_batch_buffer_that_is_filled_again, "on the host", "a copy to the device"),
    )),
    (ALONE, 2, (
        ("ids that are not there yet", ids_gathered_on_another_stream, "kernels/", "parallel/exchange.py"),
    )),
    (OF_FOUR, 4, (
        ("gradients that are reduced too early", gradients_that_no_reduction_waits_for, "reduce_scatter",
         "segment_accumulate writes"),
    )),
    (ALONE, 2, (
        ("gradients of what is not there", gradients_on_their_stream(waits=False), "segment_accumulate",
         "allgather_base writes"),
    )),
    (DEEPER, 2, (
        ("operands freed before they are waited for", gradients_released_without_a_wait, "freed", "segment_accumulate"),
    )),
    (DEEPER, 2, (
        ("ids freed early", gradients_on_their_stream(holds=False), "freed", "segment_accumulate"),
    )),
    (RING, 2, (
        ("keys that are not there", messages_that_are_not_waited_for, "megamem/attention/tile.py", "recv writes"),
        ("keys overwritten before they left", a_message_that_is_overwritten, "zero_ writes", "send reads"),
    )),
    (ALONE, 2, (
        ("a save written before it came", a_save_between_steps(waits=False), "clone reads on the host", "staging.py"),
    )),
    (ALONE, 2, (
        ("a save of weights that are still gathered", a_save_between_steps(completes=False), "staging.py",
         "weight_gathering.py"),
    )),
    (OFFLOADED, 2, (
        ("gradients that are not there", windows_that_are_not_waited_for, "on the host", "a copy to the host"),
    )),
    (replace(OF_FOUR, optimizer=OFFLOADED.optimizer), 4, (
        ("an event recorded too early", windows_with_an_early_event, "on the host", "a copy to the host"),
        ("weights gathered before they came", copies_that_wait_for_nobody(first=False), "weight_gathering.py",
         "a copy to the device"),
    )),
    (OFFLOADED, 2, (
        ("one buffer for two windows", windows_in_one_place, "copy_ writes on the host", "a copy to the device"),
        ("gradients copied before they are reduced", copies_that_wait_for_nobody(first=True), "a copy to the host",
         "the default stream"),
    )),
)  # fmt: skip
"""Configurations, their ranks, and what is planted in a run of each: its name, and words of the sentence that tells it."""
TRIED = in_rotation(RUNS, parts=2)
PLANTED = {name: (one, other) for _, _, plants in TRIED for name, _, one, other in plants}


@pytest.fixture(scope="module")
def races() -> dict[str, list[str]]:
    """Races in sentences, of layouts and of planted defects."""

    def main() -> dict[str, list[str]]:
        from lab.stand_in.watched import watched_run
        from pretrain.engine.tables import value_offload

        def found(config: RunConfig, world: int, rank: int, *plants: Plant) -> list[str]:
            with ExitStack() as stack:
                for plant in plants:
                    stack.enter_context(plant())
                (report,) = watched_run(config, world, [rank], in_order=True)
            return [str(race) for race in report.races]

        # Several windows of small tables.
        with patch.object(value_offload, "WINDOW_ELEMENTS", 1 << 9):
            of_layouts = {name: found(LAYOUTS[name], *places) for name, places in PLACES.items()}
            of_layouts["saved"] = found(ALONE, 2, 0, a_save_between_steps())
            of_runs = [
                (plants, found(config, world, 0, *(plant for _, plant, _, _ in plants)))
                for config, world, plants in TRIED
            ]
        return {**of_layouts, **{name: races for plants, races in of_runs for name, _, _, _ in plants}}

    return launch_within(main, 1, timeout_s=280, num_threads=1)[0]


@pytest.mark.parametrize("name", [*PLACES, "saved"])
def test_no_two_accesses_of_a_step_are_without_order(races: dict[str, list[str]], name: str) -> None:
    assert races[name] == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_told_with_both_lines(races: dict[str, list[str]], name: str) -> None:
    one, other = PLANTED[name]
    assert any(one in race and other in race and race.count(".py:") >= 2 for race in races[name]), races[name]
