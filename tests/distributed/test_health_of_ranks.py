"""Findings of all ranks about their health: gradients that are not finite, replicas that differ, slow hardware. A
healthy step pays nothing for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tiny_runs import SHARED, TinyRun, on, tiny_run

from pretrain.config.health import HealthConfig, SlowRankConfig, SpikeConfig
from pretrain.engine.nonfinite import NonFinite, named_globally
from pretrain.errors import UserError
from pretrain.run.folder import RunFolder
from pretrain.run.history import Incident
from pretrain.train.callback import Callback, Callbacks, Row
from pretrain.train.health.replicas import Replicas, describe_differences, differing_replicas
from pretrain.train.health.slow_ranks import SlowRanks, probe_s
from pretrain.train.loop import take_step
from pretrain.train.run import Run

FLIPPED = {
    "of a norm": ("decoder.layers.1.input_layernorm.weight", 2, False),
    "of a matrix that is split": ("decoder.layers.0.self_attention.linear_proj.weight", 1, False),
    "of a table": ("values", 3, False),
    "of main weights": ("decoder.layers.1.input_layernorm.weight", 2, True),
}
"""A parameter (or the first with the word in its name), the rank that flips a bit of it, and whether in its main
weights."""


class Listener(Callback):
    def __init__(self) -> None:
        self.incidents: list[Incident] = []

    def on_incident(self, run: Run, incident: Incident) -> None:
        self.incidents.append(incident)


@dataclass
class Seen:
    """Findings of one rank.

    Attributes:
        equal: replicas were found to be equal after training.
        differing: findings in words, by the place of the flipped bit.
        refusal: words that the callback ended with.
        told: incidents that it told of.
        counts: calls of collectives over all ranks in a step, by the rule of spikes.
        objects: number of them that gathered objects.
        rows: rows of windows.
        slow: incidents that tell of slow ranks.
    """

    equal: bool = False
    differing: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    told: list[Incident] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    objects: int = 0
    rows: list[Row] = field(default_factory=list)
    slow: list[Incident] = field(default_factory=list)


def tensor_of(run: TinyRun, name: str, of_main: bool) -> torch.Tensor | None:
    """The part of a parameter on this rank."""
    if of_main:
        of = {id(p): full for chunk in run.bare for full, p in named_globally(chunk)}
        for parameter, main in run.optimizer.chained_optimizers[0].main_weights():
            if of[id(parameter)] == name and main.numel():
                return main
        return None
    return next(p.data for chunk in run.bare for full, p in named_globally(chunk) if name in full)


@contextmanager
def flipped(tensor: torch.Tensor) -> Iterator[None]:
    bits = tensor.view(-1).view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    bits[bits.numel() // 2] ^= 1 << 3
    yield
    bits[bits.numel() // 2] ^= 1 << 3


@contextmanager
def counted() -> Iterator[tuple[list[Any], list[Any]]]:
    """All-reduces over all ranks, and gathered objects."""
    reduce, gather = dist.all_reduce, dist.all_gather_object
    reduced: list[Any] = []
    gathered: list[Any] = []

    def counted_reduce(tensor: Any, *rest: Any, **named: Any) -> Any:
        if named.get("group") is None:
            reduced.append(tensor.numel())
        return reduce(tensor, *rest, **named)

    def counted_gather(*arguments: Any, **named: Any) -> Any:
        gathered.append(arguments)
        return gather(*arguments, **named)

    with patch.object(dist, "all_reduce", counted_reduce), patch.object(dist, "all_gather_object", counted_gather):
        yield reduced, gathered


def look(folder: Path) -> Seen:
    seen = Seen()
    rank = dist.get_rank()
    base = on(SHARED, tensor=2, memory=2, micro_batch_size=4)
    # A bit of main weights that is none of the weights.
    base = replace(base, train=replace(base.train, precision="bf16"))
    for action in ("none", "skip"):
        spikes = SpikeConfig() if action == "none" else SpikeConfig(action="skip", window_steps=2)
        config = replace(
            base, health=HealthConfig(spikes=spikes, slow_ranks=SlowRankConfig(every_steps=2, factor=2.0, windows=2))
        )
        with tiny_run(config) as tiny:
            tiny.train(2)
            with counted() as (reduced, gathered):
                take_step(tiny.run, tiny.batches)
            seen.counts[action] = len(reduced)
            seen.objects += len(gathered)
            if action == "none":
                compare(tiny, seen, folder, rank)
                name_slow_ranks(tiny, seen, rank)
    return seen


def compare(tiny: TinyRun, seen: Seen, folder: Path, rank: int) -> None:
    run = tiny.run
    seen.equal = differing_replicas(run) == ()
    for place, (name, of_rank, of_main) in FLIPPED.items():
        tensor = tensor_of(tiny, name, of_main)
        mine = rank == of_rank and tensor is not None
        with flipped(tensor) if mine and tensor is not None else patch.object(run, "saver", run.saver):
            seen.differing[place] = describe_differences(differing_replicas(run))
    run.folder = RunFolder(folder)
    run.config = replace(run.config, health=replace(run.config.health, compare_replicas_every_steps=3))
    listener = Listener()
    name, of_rank, _ = FLIPPED["of a norm"]
    tensor = tensor_of(tiny, name, False)
    assert tensor is not None
    replicas = Replicas()
    Callbacks([replicas, listener])
    replicas.on_step(run, {})
    assert run.state.step == 3
    with flipped(tensor) if rank == of_rank else patch.object(run, "saver", run.saver):
        # Not on this step again, but on the next that is asked for.
        replicas.on_end(run)
        try:
            replicas.on_step(run, {})
        except UserError as error:
            seen.refusal = str(error)
    seen.told = listener.incidents


def name_slow_ranks(tiny: TinyRun, seen: Seen, rank: int) -> None:
    """A clock by which the third rank is slow from the second window to the fourth."""
    windows = iter([1.0, 3.0, 3.0, 3.0, 1.0])
    listener = Listener()
    measure: Callable[[Any], float] = lambda device: next(windows) if rank == 2 else 1.0 + 0.1 * rank  # noqa: E731
    slow = SlowRanks(measure)
    Callbacks([slow, listener])
    for step in range(4, 14):
        tiny.run.state = replace(tiny.run.state, step=step)
        row: Row = {}
        slow.on_step(tiny.run, row)
        if row:
            seen.rows.append(row)
    seen.slow = listener.incidents
    assert 0 < probe_s(torch.device("cpu")) < 60


@pytest.fixture(scope="module")
def seen(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    folder = tmp_path_factory.mktemp("replicas")
    found: list[Seen] = run_ranks(lambda: look(folder), 4)
    return found


def test_a_healthy_step_has_the_loss_and_the_norms_to_add_up_and_no_more(seen: list[Seen]) -> None:
    """A rule of spikes adds nothing."""
    for of_rank in seen:
        assert of_rank.counts == {"none": 2, "skip": 2}
        assert of_rank.objects == 0


def test_replicas_that_are_equal_are_found_to_be(seen: list[Seen]) -> None:
    assert all(of_rank.equal for of_rank in seen)


@pytest.mark.parametrize("place", FLIPPED)
def test_a_flipped_bit_is_found_and_named_on_all_ranks(seen: list[Seen], place: str) -> None:
    name, rank, of_main = FLIPPED[place]
    (words,) = {of_rank.differing[place] for of_rank in seen}
    assert name in words
    assert f"{rank} (" in words
    assert ("main weights of" in words) == of_main


def test_replicas_that_differ_end_the_run_before_it_saves(seen: list[Seen]) -> None:
    (refusal,) = {of_rank.refusal for of_rank in seen}
    assert "replicas differ after step 3: decoder.layers.1.input_layernorm.weight" in refusal
    assert "start the run again from its newest checkpoint" in refusal
    for of_rank in seen:
        (incident,) = of_rank.told
        assert (incident.step, incident.kind) == (3, "replicas")


def test_a_rank_that_is_slow_for_so_many_windows_is_named(seen: list[Seen]) -> None:
    for of_rank in seen:
        # The ranks' times are 1, 1.1, 3 and 1.3, so the median is 1.2.
        assert [row["slowest_rank"] for row in of_rank.rows] == [3, 2, 2, 2, 3]
        assert of_rank.rows[1]["slowest_rank_times"] == pytest.approx(3 / 1.2)
        (incident,) = of_rank.slow
        assert (incident.step, incident.kind) == (8, "slow rank")
        assert incident.message.startswith("rank 2 on ")
        assert "computes 2.50 times as long as the median rank (3 s and 1.2 s), for 2 windows in a row" in (
            incident.message
        )


def poisoned() -> tuple[tuple[NonFinite, ...], bool, int]:
    """Findings of a step whose third rank has one gradient that is not finite."""
    with tiny_run(on(SHARED, tensor=2, pipeline=2)) as tiny:
        tiny.train(1)
        prepare = tiny.optimizer.prepare_grads

        def poison() -> Any:
            if dist.get_rank() == 2:
                of_norm = tiny.bare[0].decoder.layers[1].input_layernorm.weight
                of_norm.main_grad[5] = math.nan
            return prepare()

        tiny.optimizer.prepare_grads = poison  # type: ignore[method-assign]
        result, _ = take_step(tiny.run, tiny.batches)
        return result.non_finite, result.updated, tiny.num_skipped


def test_a_gradient_that_is_not_finite_is_named(run_ranks: Any) -> None:
    """Its block counts from the model's first one: the second of the second stage's two."""
    for found, updated, num_skipped in run_ranks(poisoned, 4):
        assert (updated, num_skipped) == (False, 1)
        (one,) = found
        assert (one.rank, one.stage, one.names) == (2, 1, ("decoder.layers.3.input_layernorm.weight",))
        assert (one.num_parameters, one.of > 10) == (1, True)
        assert "rank 2 (" in str(one)


def test_the_first_few_are_named() -> None:
    from pretrain.engine.nonfinite import describe_non_finite

    of_ranks = [NonFinite(rank, "node", 0, ("a", "b", "c"), 9, 20) for rank in range(6)]
    words = describe_non_finite(of_ranks)
    assert words.startswith(
        "not finite are gradients on rank 0 (node, stage 0): a, b, c and 6 more (9 of 20 parameters)"
    )
    assert words.endswith("; and 2 ranks more")
