"""Order of accesses on a GPU's streams beside training with whole sequences: in evaluation, saves, restores, generation,
and attention across ranks. None is left to chance, and what is, when it is planted, is told with both lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from lab.tests.unit.test_stand_in_order import ALONE, start
from pretrain.config.schema import ParallelConfig, RunConfig
from tests.deadline import launch_within
from tests.rotation import in_rotation

GATHER, HEADS = (
    replace(ALONE, parallel=ParallelConfig(context=2, context_attention=way, memory=2)) for way in ("gather", "heads")
)
LAYOUTS = {"all commands": ALONE, "gather": GATHER, "heads": HEADS}

Plant = Callable[[], AbstractContextManager[Any]]


def only_in(command: str, plant: Plant) -> Plant:
    """A plant that is there while one command runs."""

    def planted() -> AbstractContextManager[Any]:
        from lab.stand_in import commands

        run = getattr(commands, command)

        def with_plant(*args: Any, **options: Any) -> Any:
            with plant():
                return run(*args, **options)

        return patch.object(commands, command, with_plant)

    return planted


@contextmanager
def a_loss_read_before_it_came() -> Iterator[None]:
    from pretrain.engine import step

    sums = step.world_sums

    def read(of_rank: Any, groups: Any) -> Any:
        on_host = sums(of_rank, groups).to("cpu", non_blocking=True)
        return on_host.clone()

    with patch.object(step, "world_sums", read):
        yield


@contextmanager
def logits_read_before_they_came() -> Iterator[None]:
    from pretrain.evaluation import generate

    choose = generate._choose

    def read(self: Any) -> Any:
        return self.to("cpu", non_blocking=True)

    def chosen(logits: Any, *others: Any) -> Any:
        return choose(logits.clone(), *others)

    with patch("torch.Tensor.cpu", read), patch.object(generate, "_choose", chosen):
        yield


@contextmanager
def keys_cached_on_another_stream() -> Iterator[None]:
    import torch

    from megamem.attention.kv_cache import KeyValueCache

    extend = KeyValueCache.extend

    def elsewhere(self: Any, *args: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return extend(self, *args)

    with patch.object(KeyValueCache, "extend", elsewhere):
        yield


@contextmanager
def a_save_that_waits_for_nobody() -> Iterator[None]:
    with patch("torch.cuda.synchronize", lambda: None):
        yield


@contextmanager
def items_in_one_page_locked_buffer() -> Iterator[None]:
    from pretrain.checkpoint import loading

    buffers: dict[Any, Any] = {}

    def copy(stored: Any, region: Any, target: Any) -> None:
        import torch

        source = stored.read((0,) * target.data.dim(), target.data.shape)
        buffer = buffers.setdefault(
            source.dtype, torch.empty(1 << 20, dtype=source.dtype, device="cpu", pin_memory=True)
        )
        window = buffer[: source.numel()].view(source.shape)
        window.copy_(source)
        target.data.copy_(window, non_blocking=True)

    with patch.object(loading, "_copy", copy):
        yield


@contextmanager
def weights_set_beside_their_gather() -> Iterator[None]:
    from pretrain.checkpoint import run_entries as run
    from pretrain.engine.optimizer import MemoryOptimizer

    start_gathering, set_weights = run.start_gathering, MemoryOptimizer.set_weights_from_main
    later: list[Any] = []

    def put_off(self: Any) -> None:
        later.append(self)

    def gather(chunks: Any) -> None:
        start_gathering(chunks)
        set_weights(later.pop())

    with (
        patch.object(MemoryOptimizer, "set_weights_from_main", put_off),
        patch.object(run, "start_gathering", gather),
    ):
        yield


@contextmanager
def collectives_without_a_wait(name: str, module: str) -> Iterator[None]:
    import torch.distributed as dist

    original, works = getattr(dist, name), []

    def started(*args: Any, **options: Any) -> None:
        works.append(original(*args, **options, async_op=True))

    with patch(f"{module}.dist.{name}", started):
        yield


RUNS: tuple[tuple[RunConfig, tuple[tuple[str, Plant, str, str], ...]], ...] = (
    (ALONE, (
        ("evaluation: a wait left out before the memory", only_in("evaluation", start(waits=False)),
         "megamem/layers/tucker.py", "triton_rms_norm"),
        ("evaluation: a loss read before it came", only_in("evaluation", a_loss_read_before_it_came),
         "clone reads on the host", "a copy to the host"),
        ("saving: an item written before it came", only_in("saving", a_save_that_waits_for_nobody),
         "clone reads on the host", "pretrain/checkpoint/staging.py"),
        ("restoring: one buffer for two items", only_in("restoring", items_in_one_page_locked_buffer),
         "copy_ writes on the host", "a copy to the device"),
        ("generation: logits read before they came", only_in("generation", logits_read_before_they_came),
         "clone reads on the host", "a copy to the host"),
    )),
    (ALONE, (
        ("evaluation: a wait left out behind the memory", only_in("evaluation", start(joins=False)),
         "megamem/blocks/memory_sites.py", "megamem/layers/tucker.py"),
        ("restoring: weights set beside their gather", only_in("restoring", weights_set_beside_their_gather),
         "pretrain/engine/optimizer.py", "weight_gathering.py"),
        ("generation: keys cached on another stream", only_in("generation", keys_cached_on_another_stream),
         "megamem/attention/kv_cache.py", "stream"),
    )),
    (GATHER, (
        ("gather: keys that are not there",
         partial(collectives_without_a_wait, "all_gather_into_tensor", "parallel.context"),
         "parallel/context.py", "the stream of group"),
    )),
    (HEADS, (
        ("heads: tokens that are not there",
         partial(collectives_without_a_wait, "all_to_all_single", "parallel.context_heads"),
         "parallel/context_heads.py", "the stream of group"),
    )),
)  # fmt: skip
"""Configurations, and what is planted in a run of each: its name, and words of the sentence that tells it."""
TRIED = in_rotation(RUNS, parts=2)
PLANTED = {name: (one, other) for _, plants in TRIED for name, _, one, other in plants}


@pytest.fixture(scope="module")
def races() -> dict[str, list[str]]:
    """Races in sentences, of layouts and of planted defects."""

    def main() -> dict[str, list[str]]:
        from lab.stand_in.watched import watched_run

        def found(config: RunConfig, *plants: Plant) -> list[str]:
            with ExitStack() as stack:
                for plant in plants:
                    stack.enter_context(plant())
                (report,) = watched_run(config, 2, [0], in_order=True, all_commands=True)
            return [str(race) for race in report.races]

        of_runs = [(plants, found(config, *(plant for _, plant, _, _ in plants))) for config, plants in TRIED]
        of_layouts = {name: found(config) for name, config in LAYOUTS.items()}
        return {**of_layouts, **{name: races for plants, races in of_runs for name, _, _, _ in plants}}

    return launch_within(main, 1, timeout_s=280, num_threads=1)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_two_accesses_are_without_order(races: dict[str, list[str]], name: str) -> None:
    assert races[name] == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_told_with_both_lines(races: dict[str, list[str]], name: str) -> None:
    one, other = PLANTED[name]
    assert any(one in race and other in race and race.count(".py:") >= 2 for race in races[name]), races[name]
