"""The time of one optimizer step, divided among ranges so that each moment belongs to exactly one.

Between two marks time belongs to what was entered last and not left yet. So the ranges add up to the step, and a part's
time is its own, without that of the parts inside of it. A differentiable part is marked in backward as well, by
functions of autograd around it that compute nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megamem.layers.retrieval import Retrieved


class Range(NamedTuple):
    """Phase and part that the time between two marks belongs to.

    Attributes:
        phase: name of a phase of the step, as in "forward"; never empty.
        part: name of a part of the memory, as in "projections"; empty outside of it.
    """

    phase: str
    part: str


@dataclass
class RangeTimes:
    """Times of one or more steps.

    Attributes:
        seconds: time of each range.
        entries: number of times that each range was entered.
        num_steps: steps behind both.
    """

    seconds: dict[Range, float] = field(default_factory=dict)
    entries: Counter[Range] = field(default_factory=Counter)
    num_steps: int = 0

    def mean_s(self, phase: str | None = None, part: str | None = None) -> float:
        """Seconds of one step, or of its ranges with this phase, this part."""
        chosen = [s for where, s in self.seconds.items() if phase in (None, where.phase) and part in (None, where.part)]
        return sum(chosen) / self.num_steps

    def add(self, other: RangeTimes) -> None:
        """Takes in further steps."""
        for where, seconds in other.seconds.items():
            self.seconds[where] = self.seconds.get(where, 0.0) + seconds
        self.entries.update(other.entries)
        self.num_steps += other.num_steps


class Timeline:
    """Records marks while a step runs: on GPUs events on the current stream, for which nothing waits; on CPUs times.

    All work must run on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._open: list[Range] = []
        self._ranges: list[Range] = []
        self._times: list[float] = []
        self._entries: Counter[Range] = Counter()

    def begin(self, phase: str) -> None:
        """Start a step, in a phase that lasts wherever no other one is entered."""
        self._open, self._ranges, self._times, self._entries = [Range(phase, "")], [], [], Counter()
        self._mark()

    def end(self) -> RangeTimes:
        """End the step. Waits for the device."""
        assert len(self._open) == 1, f"entered and not left: {self._open[1:]}"
        self._mark()
        seconds: dict[Range, float] = {}
        for where, duration in zip(self._ranges[:-1], self._durations(), strict=True):
            seconds[where] = seconds.get(where, 0.0) + duration
        return RangeTimes(seconds, self._entries, 1)

    def enter_phase(self, phase: str) -> None:
        """Count time from here on to the phase, until `leave_phase`."""
        assert not self._open[-1].part, f"{phase} begins inside of {self._open}"
        self._enter(Range(phase, ""))

    def leave_phase(self) -> None:
        """Back to the phase before."""
        assert len(self._open) > 1, "no phase was entered"
        self.leave("")

    def enter(self, part: str) -> None:
        """Count time from here on to the part, until it is left."""
        self._enter(Range(self._open[-1].phase, part))

    def leave(self, part: str) -> None:
        """Back to what was before; the part must be the one that was entered last."""
        assert self._open[-1].part == part, f"{part or 'a phase'} ends inside of {self._open}"
        self._open.pop()
        self._mark()

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """A phase, as a context or around a function."""
        self.enter_phase(phase)
        yield
        self.leave_phase()

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """A part that has no backward pass, or whose backward pass is marked elsewhere, in the same two ways."""
        self.enter(part)
        yield
        self.leave(part)

    def differentiable(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a part in forward and in backward.

        In backward the part is entered when gradients of the result arrive, and left when those of all arguments are
        there. Everything computed from its arguments must lie on a way from the result to them. Where no way leads there, as from
        rows that a chunk reads once for all its layers, backward has no marks; the first call tells.

        Args:
            part: its name.
            function: a function of tensors, given by position; returns a tensor, a tuple of them, or what a retrieval
                returns.
        """

        known: list[bool] = []

        @self.part(part)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wanting = [i for i, arg in enumerate(args) if _wants_gradient(arg)]
            if not wanting or known == [False]:
                return function(*args, **kwargs)
            tensors = _MarkInBackward.apply(self.leave, part, *(args[i] for i in wanting))
            marked = dict(zip(wanting, tensors, strict=True))
            out = function(*(marked.get(i, arg) for i, arg in enumerate(args)), **kwargs)
            if not known:
                known.append(_leads_to(out, tensors[0].grad_fn))
            if known == [False]:
                return out
            return _map_tensors(partial(_MarkInBackward.apply, self.enter, part), out)

        return timed

    def _enter(self, where: Range) -> None:
        self._open.append(where)
        self._entries[where] += 1
        self._mark()

    def _mark(self) -> None:
        index = len(self._ranges)
        self._ranges.append(self._open[-1])
        if not self._on_gpu:
            self._times.append(time.perf_counter())
            return
        if index == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[index].record()

    def _durations(self) -> list[float]:
        """Seconds from each mark to the next."""
        if not self._on_gpu:
            return [after - before for before, after in pairwise(self._times)]
        events = self._events[: len(self._ranges)]
        # Host sync, after the step.
        events[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def _map_tensors(function: Callable[..., tuple[Tensor, ...]], out: Any) -> Any:
    """Pass the differentiable tensors of a part's result through a function of all of them."""
    if isinstance(out, Retrieved):
        return replace(out, scores=function(out.scores)[0])
    if isinstance(out, tuple):
        return function(*out)
    return function(out)[0] if out is not None else None


def _leads_to(out: Any, node: Any) -> bool:
    """Tell whether the gradient of a part's result goes through this node of autograd's graph."""
    found: list[Any] = []

    def collect(*tensors: Tensor) -> tuple[Tensor, ...]:
        found.extend(tensor.grad_fn for tensor in tensors)
        return tensors

    _map_tensors(collect, out)
    seen: set[Any] = set()
    while found:
        at = found.pop()
        if at is node:
            return True
        if at is not None and at not in seen:
            seen.add(at)
            found += [before for before, _ in at.next_functions]
    return False


def _wants_gradient(arg: Any) -> bool:
    """True if a gradient passes on through the argument; that of a weight ends where it is."""
    is_weight = isinstance(arg, nn.Parameter)
    return torch.is_grad_enabled() and isinstance(arg, Tensor) and arg.requires_grad and not is_weight


class _MarkInBackward(torch.autograd.Function):
    """The identity on tensors at the edge of a part; its backward pass marks the edge, and computes nothing.

    Around a part's results it enters the part; around its arguments, whose gradients come last, it leaves it.
    """

    @staticmethod
    def forward(ctx: Any, mark: Callable[[str], None], part: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark, ctx.part = mark, part
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ctx.mark(ctx.part)
        return None, None, *grads
