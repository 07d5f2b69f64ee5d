"""Effects of the keys under `health`, measured on runs on one rank with planted losses and norms, and on callbacks
whose other ranks are stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from keys_of_runs import RUN, Outputs
from keys_table import Table, set_key

import pretrain.engine.step as step_module
import pretrain.train.health.replicas as replicas
import pretrain.train.health.slow_ranks as slow_ranks
from parallel.processes.hang_watch import HangWatch
from pretrain.config.health import HealthConfig, SlowRankConfig, SpikeConfig
from pretrain.config.schema import RunConfig
from pretrain.engine.gradient_norms import GradientNorms
from pretrain.errors import UserError
from pretrain.run.folder import RunFolder
from pretrain.run.history import Incident
from pretrain.state import RunState
from pretrain.train.callback import Callback, Callbacks
from pretrain.train.callbacks import default_callbacks, health_callbacks
from pretrain.train.health.slow_ranks import SlowRanks
from pretrain.train.loop import train
from pretrain.train.run import Run

HEALTH = Table()


def judging(**fields: Any) -> RunConfig:
    """Configuration with a rule that judges norms (of a window of 1 and 2: those above 3) unless told otherwise."""
    rule = {"action": "skip", "window_steps": 2, "loss_deviations": None, "grad_norm_deviations": 3.0, **fields}
    return replace(RUN, health=HealthConfig(spikes=SpikeConfig(**rule)))


def trained(outputs: Outputs, norms: Sequence[float] = (), losses: Sequence[float] = ()) -> Run:
    """A run whose steps have these norms and losses, one after the other, and then 1."""
    run = outputs.open()
    planted_norms, planted_losses = followed_by_ones(norms), followed_by_ones(losses)
    gradient_norms, world_loss = run.optimizer.gradient_norms, step_module._world_loss

    def planted() -> GradientNorms:
        return replace(gradient_norms(), main=next(planted_norms))

    def planted_loss(*arguments: Any) -> Any:
        loss, *rest = world_loss(*arguments)
        return (replace(loss, nats=next(planted_losses) * loss.num_tokens), *rest)

    run.optimizer.gradient_norms = planted  # type: ignore[method-assign]
    # Evaluations have losses of their own.
    callbacks = [callback for callback in default_callbacks(run) if type(callback).__name__ != "Evaluations"]
    with patch.object(step_module, "_world_loss", planted_loss):
        train(run, callbacks)
    return run


def followed_by_ones(numbers: Sequence[float]) -> Iterator[float]:
    yield from numbers
    while True:
        yield 1.0


@HEALTH.key("health.spikes.action", "skip", judging(action="none"))
def _(base: Outputs, second: Outputs) -> None:
    states = [trained(outputs, norms=(1, 2, 9)).state for outputs in (base, second)]
    assert [(state.num_spikes, state.num_skipped, state.num_updates) for state in states] == [(0, 0, 6), (1, 1, 5)]


@HEALTH.key("health.spikes.window_steps", 3, judging())
def _(base: Outputs, second: Outputs) -> None:
    """The third step is judged, or not yet."""
    assert [trained(outputs, norms=(1, 2, 9)).state.num_spikes for outputs in (base, second)] == [1, 0]


@HEALTH.key("health.spikes.grad_norm_deviations", 13.0, judging())
def _(base: Outputs, second: Outputs) -> None:
    """Above 3, or above 8."""
    assert [trained(outputs, norms=(1, 2, 7.9)).state.num_spikes for outputs in (base, second)] == [1, 0]


@HEALTH.key("health.spikes.loss_deviations", 3.0, judging())
def _(base: Outputs, second: Outputs) -> None:
    assert [trained(outputs, losses=(1, 2, 3.1)).state.num_spikes for outputs in (base, second)] == [0, 1]
    assert trained(second, losses=(1, 2, 2.9)).state.num_spikes == 0


REWINDING = set_key(judging(action="rewind"), "checkpoint.every_steps", 2)


@HEALTH.key("health.spikes.max_rewinds", 1, REWINDING)
def _(base: Outputs, second: Outputs) -> None:
    """The third step is a spike, and is one again after the run went back."""
    assert trained(base, norms=(1, 2, 9, 9)).state.num_rewinds == 2
    with pytest.raises(UserError, match=r"has gone back 1 times already .*max_rewinds = 1"):
        trained(second, norms=(1, 2, 9, 9))


def awaited(outputs: Outputs) -> dict[str, set[float]]:
    """Seconds that a run grants to plain steps, and to all else."""
    found: dict[str, set[float]] = {"steps": set(), "else": set()}

    def expect(watch: HangWatch, what: str, within_s: float) -> None:
        found["steps" if what in {f"step {number}" for number in range(9)} else "else"].add(within_s)

    with patch.object(HangWatch, "expect", expect):
        trained(outputs)
    return found


@HEALTH.key("health.hang_minutes", 7.0, RUN)
def _(base: Outputs, second: Outputs) -> None:
    """Half of a collective's ten minutes, or as many as asked for; none at all with 0."""
    assert awaited(base) == {"steps": {300.0}, "else": {3600.0}}
    assert awaited(second) == {"steps": {420.0}, "else": {3600.0}}
    never = Outputs(set_key(RUN, "health.hang_minutes", 0.0), base.groups)
    assert awaited(never) == {"steps": set(), "else": set()}


@HEALTH.key("health.long_phase_minutes", 30.0, RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert awaited(second) == {"steps": {300.0}, "else": {1800.0}}


class Listener(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_incident(self, run: Run, incident: Incident) -> None:
        self.steps.append(incident.step)


def standing_in(outputs: Outputs, step: int) -> Any:
    """A run on three ranks after a step."""
    groups = SimpleNamespace(world_size=3, rank=0, device=torch.device("cpu"))
    folder = RunFolder(outputs.opened.folder.path)
    return SimpleNamespace(config=outputs.config, groups=groups, state=RunState(step=step), folder=folder)


def windows(outputs: Outputs) -> tuple[list[int], list[int]]:
    """Steps of six that end a window, and those at which a rank of three times the others' time is named."""
    listener, measured = Listener(), []
    slow = SlowRanks(measure=lambda device: 1.0)
    Callbacks([slow, listener])
    ranks = MagicMock()
    ranks.all_gather_into_tensor = lambda out, mine: out.copy_(torch.tensor([1.0, 3.0, 1.0]))
    with patch.object(slow_ranks, "dist", ranks):
        for step in range(1, 7):
            row: dict[str, Any] = {}
            slow.on_step(standing_in(outputs, step), row)
            if row:
                assert row == {"slowest_rank": 1, "slowest_rank_times": 3.0}
                measured.append(step)
    return measured, listener.steps


def every_step(**fields: Any) -> RunConfig:
    return replace(RUN, health=HealthConfig(slow_ranks=SlowRankConfig(every_steps=1, **fields)))


@HEALTH.key("health.slow_ranks.every_steps", 2, RUN)
def _(base: Outputs, second: Outputs) -> None:
    assert (windows(base), windows(second)) == (([], []), ([2, 4, 6], [6]))


@HEALTH.key("health.slow_ranks.factor", 4.0, every_step())
def _(base: Outputs, second: Outputs) -> None:
    assert (windows(base)[1], windows(second)[1]) == ([3, 6], [])


@HEALTH.key("health.slow_ranks.windows", 2, every_step())
def _(base: Outputs, second: Outputs) -> None:
    assert (windows(base)[1], windows(second)[1]) == ([3, 6], [2, 4, 6])


@HEALTH.key("health.compare_replicas_every_steps", 2, set_key(RUN, "checkpoint.every_steps", 3))
def _(base: Outputs, second: Outputs) -> None:
    """Every second step, and before what is saved every third one; not twice at the end."""
    for outputs, expected in ((base, []), (second, [2, 3, 4, 6])):
        compared: list[int] = []
        with patch.object(
            replicas, "differing_replicas", lambda run, compared=compared: compared.append(run.state.step)
        ):
            found = health_callbacks(standing_in(outputs, 0))
            comparing = Callbacks(each for each in found if isinstance(each, replicas.Replicas))
            for step in range(1, 7):
                comparing.on_step(standing_in(outputs, step), {})
            comparing.on_end(standing_in(outputs, 6))
        assert compared == expected
