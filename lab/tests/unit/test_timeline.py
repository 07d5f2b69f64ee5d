"""The intervals of a step: whose time is whose, in forward and in backward, on the clock of a CPU and by a GPU's
events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.bench import timeline as module
from lab.bench.timeline import Range, RangeTimes, Timeline

CPU = torch.device("cpu")


class Clock:
    """Time that passes when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock.perf_counter)
    return clock


def takes(clock: Clock, forward: float, backward: float) -> Callable[[Tensor], Tensor]:
    """The identity, which takes so many seconds in each pass."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            clock.now += forward
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Tensor:
            clock.now += backward
            grad: Tensor = grads[0]
            return grad

    def run(x: Tensor) -> Tensor:
        out: Tensor = Slow.apply(x)
        return out

    return run


def test_time_belongs_to_what_was_entered_last(clock: Clock) -> None:
    timeline = Timeline(CPU)
    timeline.begin("rest")
    clock.now += 1
    timeline.enter_phase("forward")
    clock.now += 2
    timeline.enter("outer")
    clock.now += 4
    timeline.enter("inner")
    clock.now += 8
    timeline.leave("inner")
    clock.now += 16
    timeline.leave("outer")
    timeline.leave_phase()
    clock.now += 32
    found = timeline.end()
    assert found.seconds == {
        Range("rest", ""): 33,
        Range("forward", ""): 2,
        Range("forward", "outer"): 20,
        Range("forward", "inner"): 8,
    }
    assert found.entries == {Range("forward", ""): 1, Range("forward", "outer"): 1, Range("forward", "inner"): 1}
    assert (found.mean_s(), found.num_steps) == (63, 1)
    sums = RangeTimes()
    sums.add(found)
    sums.add(found)
    assert (sums.mean_s(), sums.num_steps, sums.entries[Range("forward", "inner")]) == (63, 2, 2)
    assert (sums.mean_s("forward"), sums.mean_s(part=""), sums.mean_s("forward", "outer")) == (30, 35, 20)


def test_a_part_is_marked_in_backward_too(clock: Clock) -> None:
    timeline = Timeline(CPU)
    inner = timeline.differentiable("inner", takes(clock, 2, 20))
    after = takes(clock, 4, 40)
    outer = timeline.differentiable("outer", lambda x, y: after(inner(x) * y))
    beside = takes(clock, 8, 80)
    x, y = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    timeline.begin("forward")
    loss = (outer(x.sin(), y.cos()) + beside(x)).sum()
    timeline.enter_phase("backward")
    loss.backward()
    timeline.leave_phase()
    found = timeline.end()
    assert {where: s for where, s in found.seconds.items() if s} == {
        Range("forward", "inner"): 2,
        Range("forward", "outer"): 4,
        Range("forward", ""): 8,
        Range("backward", "inner"): 20,
        Range("backward", "outer"): 40,
        Range("backward", ""): 80,
    }
    assert found.entries[Range("backward", "inner")] == found.entries[Range("backward", "outer")] == 1
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos() * y.detach().cos() + 1)
    torch.testing.assert_close(y.grad, -y.detach().sin() * x.detach().sin())


def test_a_weight_keeps_its_identity(clock: Clock) -> None:
    """Megatron's gradients hang on the parameter itself."""
    weight = nn.Parameter(torch.ones(3))
    seen: list[Tensor] = []

    def product(table: Tensor, x: Tensor) -> Tensor:
        seen.append(table)
        return table * x

    timeline = Timeline(CPU)
    timeline.begin("forward")
    timeline.differentiable("product", product)(weight, torch.ones(3, requires_grad=True) * 2).sum().backward()
    timeline.end()
    assert seen[0] is weight


def test_without_gradients_there_is_a_forward_pass_only(clock: Clock) -> None:
    timeline = Timeline(CPU)
    part = timeline.differentiable("part", takes(clock, 1, 1))
    timeline.begin("forward")
    with torch.no_grad():
        part(torch.ones(2, requires_grad=True))
    assert part(torch.ones(2)).grad_fn is None
    assert timeline.end().entries == {Range("forward", "part"): 2}


def test_marks_that_do_not_match_are_found() -> None:
    timeline = Timeline(CPU)
    timeline.begin("rest")
    timeline.enter("a")
    with pytest.raises(AssertionError, match="b ends inside of"):
        timeline.leave("b")
    with pytest.raises(AssertionError, match="forward begins inside of"):
        timeline.enter_phase("forward")
    with pytest.raises(AssertionError, match="entered and not left"):
        timeline.end()
    timeline.leave("a")
    with pytest.raises(AssertionError, match="no phase was entered"):
        timeline.leave_phase()
    timeline.enter_phase("forward")
    with pytest.raises(AssertionError, match="entered and not left"):
        timeline.end()


def test_on_a_gpu_events_are_recorded_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [0.0], []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            log.append("new")

        def record(self) -> None:
            self.at = now[0]
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timeline = Timeline(torch.device("cuda"))
    for _ in range(2):
        timeline.begin("rest")
        now[0] += 3
        timeline.enter("part")
        now[0] += 5
        timeline.leave("part")
        assert "wait" not in log[-3:]
        # Milliseconds.
        assert timeline.end().seconds == {Range("rest", ""): 0.003, Range("rest", "part"): 0.005}
    assert (log.count("new"), log.count("record"), log.count("wait")) == (4, 8, 2)


def test_a_part_whose_result_knows_nothing_of_its_arguments_has_no_marks_in_backward() -> None:
    timeline = Timeline(torch.device("cpu"))
    shared = torch.ones(2, requires_grad=True)
    apart = timeline.differentiable("apart", lambda x: 2 * shared)
    timeline.begin("rest")
    x = torch.ones(2, requires_grad=True) * 3
    for _ in range(2):
        (apart(x) + x).sum().backward(retain_graph=True)
    found = timeline.end()
    assert shared.grad is not None
    assert found.entries == {Range("rest", "apart"): 2}
