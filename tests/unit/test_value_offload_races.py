"""Stepping tables in host memory waits for every copy that it must wait for, and hides the others. The streams are
stand-ins.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stream_races import HOST, Event, Races, Stream
from torch import Tensor, nn

from pretrain.engine.tables import value_offload
from pretrain.engine.tables.value_offload import HostAdamW, HostTables
from pretrain.engine.update_rules import Share

WINDOW = 4


class PlainAdamW(HostAdamW):
    """Reads and writes on the host what a step of AdamW does, and subtracts the gradient."""

    def __init__(self, races: Races) -> None:
        self._races = races

    def update(self, weights: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **settings: Any) -> None:
        self._races.use(
            f"update {settings['num_updates']} of {weights.numel()} elements",
            actor=HOST,
            reads=[gradient],
            writes=[weights, exp_avg, exp_avg_sq],
        )
        weights -= settings["lr"] * gradient


def share_of(weights: Tensor, *, lr: float = 0.0, weight_decay: float = 0.0) -> Share:
    """All of a table of these weights, whose gradient is 0."""
    group = {"lr": lr, "weight_decay": weight_decay}
    return Share(nn.Parameter(weights), 0, group, weights, torch.zeros(weights.numel()))


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_offload, "WINDOW_ELEMENTS", WINDOW)


def step_three_times(*sizes: int) -> Races:
    """Three steps of tables of these sizes, each between a backward pass that adds to the gradients, and a forward pass
    that reads the weights.
    """
    races = Races()
    with races.watching():
        shares = [share_of(torch.full((size,), 50.0), lr=1.0) for size in sizes]
        weights, gradients = [share.weights for share in shares], [share.gradient for share in shares]
        tables = HostTables(shares, (), adamw=PlainAdamW(races))
        races.on_device(*weights, *gradients)
        for step in range(3):
            races.queue("forward", reads=weights)
            races.queue("backward", reads=weights, writes=gradients)
            for gradient in gradients:
                gradient[:] = torch.arange(gradient.numel()) + step
            tables.step()
        races.queue("forward", reads=weights)
    for share in shares:
        # Less i + (i + 1) + (i + 2) of element i.
        assert torch.equal(share.weights, 50 - 3 * torch.arange(share.weights.numel()) - 3)
        assert torch.equal(tables.main_weights(share), share.weights)
    return races


SIZES = ((WINDOW,), (2 * WINDOW,), (5 * WINDOW - 1,), (2 * WINDOW + 1, 3 * WINDOW), (3,))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_no_two_uses_of_one_memory_are_in_no_order(sizes: tuple[int, ...]) -> None:
    races = step_three_times(*sizes)
    assert not races.found
    assert not races.blocking


WAITS: dict[str, tuple[type, str, str]] = {
    "the copies wait for backward": (Stream, "wait_stream", "copies"),
    "the next forward pass waits for the copies": (Stream, "wait_stream", "compute"),
    "the host waits for the gradient": (Event, "synchronize", ""),
    "the arrival of the gradient is recorded": (Event, "record", ""),
}
"""Call that makes each wait, and the stream it is made on."""


@pytest.mark.parametrize("what", WAITS)
def test_without_any_one_of_the_waits_there_is_a_race(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    kind, name, stream = WAITS[what]
    real, dropped = getattr(kind, name), []

    def sometimes(self: Any, *arguments: Any) -> None:
        if not stream or self.name == stream:
            dropped.append(self)
        else:
            real(self, *arguments)

    monkeypatch.setattr(kind, name, sometimes)
    assert step_three_times(5 * WINDOW - 1).found
    assert dropped


def test_the_next_window_is_on_its_way_while_the_host_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls: a gradient is asked for one window ahead, and weights are sent as soon as they are there."""
    calls: list[str] = []
    for name in ("_fetch", "_update", "_send"):
        real = getattr(HostTables, name)

        def logged(self: HostTables, index: int, name: str = name, real: Any = real) -> None:
            calls.append(f"{name[1:]} {index}")
            real(self, index)

        monkeypatch.setattr(HostTables, name, logged)
    step_three_times(3 * WINDOW)
    one_step = ["fetch 0", "fetch 1", "update 0", "send 0", "fetch 2", "update 1", "send 1", "update 2", "send 2"]
    assert calls == 3 * one_step


def test_the_hosts_moments_have_seen_as_many_updates_as_there_were() -> None:
    races, seen = Races(), []

    class Counting(PlainAdamW):
        def update(self, *arguments: Any, **settings: Any) -> None:
            seen.append((settings["num_updates"], settings["lr"], settings["weight_decay"]))

    with races.watching():
        share = share_of(torch.zeros(WINDOW), lr=0.5, weight_decay=0.25)
        tables = HostTables([share], (), adamw=Counting(races))
        tables.step()
        share.num_updates = 7
        tables.step()
        share.group["lr"] = 0.125
        tables.step()
    assert seen == [(0, 0.5, 0.25), (7, 0.5, 0.25), (8, 0.125, 0.25)]
    assert share.num_updates == 9


@pytest.mark.parametrize("on_gpu", [True, False])
def test_staging_memory_is_page_locked_for_weights_on_a_gpu(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    """Two windows' gradients, and their weights in the model's dtype; without page locks copies would not be in flight."""
    races, made = Races(), []
    empty = torch.empty

    def watching(size: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> Tensor:
        made.append((size, dtype, device, pin_memory))
        return empty(size, dtype=dtype, device=device)

    share = share_of(torch.zeros(2 * WINDOW, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: on_gpu), raising=False)
    monkeypatch.setattr(torch, "empty", watching)
    with races.watching():
        HostTables([share], (), adamw=PlainAdamW(races))
    assert made == 2 * [(WINDOW, torch.float32, "cpu", on_gpu), (WINDOW, torch.bfloat16, "cpu", on_gpu)]
