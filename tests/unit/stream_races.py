"""Stand-ins for CUDA streams and events, and a checker that finds two uses of one memory in no order.

Every actor (the host, and each stream) has a vector clock. Work queued on a stream comes after what the host did
before, and after what the stream was told to wait for; what the host does comes after what it waited for. Two uses of
overlapping memory, one of them a write, must be in such an order, or the result depends on who is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Clock = dict[str, int]
HOST = "host"


def joined(*clocks: Clock) -> Clock:
    return {actor: max(clock.get(actor, 0) for clock in clocks) for clock in clocks for actor in clock}


@dataclass(frozen=True)
class Use:
    """Some bytes, read or written by an actor at its own time; `seen` is what it knows of the others'."""

    what: str
    actor: str
    seen: Clock
    start: int
    stop: int
    writes: bool

    def is_before(self, other: Use) -> bool:
        return self.seen[self.actor] <= other.seen.get(self.actor, 0)


class Races:
    """History of the host and of streams that exist in name only.

    Attributes:
        found: pairs of uses in no order.
        blocking: copies that the host waited for.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.blocking: list[str] = []
        self._clocks: dict[str, Clock] = {HOST: {HOST: 0}}
        self._uses: list[Use] = []
        self._device: list[tuple[int, int]] = []
        self._current: list[Stream] = [Stream(self, "compute")]

    def on_device(self, *tensors: Tensor) -> None:
        """Take these tensors for tensors of a GPU, whose copies are queued."""
        self._device += [_bytes_of(tensor) for tensor in tensors]

    def is_on_device(self, tensor: Tensor) -> bool:
        start, stop = _bytes_of(tensor)
        return any(first <= start and stop <= last for first, last in self._device)

    def use(self, what: str, *, actor: str, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Something that an actor does with tensors, after all that it has done and waited for."""
        clocks = (self._clocks[actor],) if actor == HOST else (self._clocks[actor], self._clocks[HOST])
        seen = joined(*clocks)
        seen[actor] = seen.get(actor, 0) + 1
        self._clocks[actor] = seen
        for tensors, written in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._add(Use(what, actor, seen, *_bytes_of(tensor), written))

    def queue(self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """A kernel on the current stream."""
        self.use(what, actor=self._current[-1].name, reads=reads, writes=writes)

    def _add(self, use: Use) -> None:
        for other in self._uses:
            overlap = other.start < use.stop and use.start < other.stop
            if overlap and (other.writes or use.writes) and not other.is_before(use):
                self.found.append(f"{other.what} ({other.actor}) and {use.what} ({use.actor})")
        self._uses.append(use)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Streams and events of `torch.cuda` are stand-ins meanwhile, and copies are written down."""
        with pytest.MonkeyPatch.context() as patch, _Copies(self):
            patch.setattr(torch.cuda, "Stream", lambda *_: Stream(self, "copies"))
            patch.setattr(torch.cuda, "Event", lambda *_, **__: Event(self))
            patch.setattr(torch.cuda, "current_stream", lambda *_: self._current[-1])
            patch.setattr(torch.cuda, "stream", self._entered)
            yield

    @contextmanager
    def _entered(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def clock(self, actor: str) -> Clock:
        return self._clocks.setdefault(actor, {})

    def wait(self, actor: str, clock: Clock) -> None:
        self._clocks[actor] = joined(self.clock(actor), clock)


class Stream:
    """A stream by name."""

    def __init__(self, races: Races, name: str) -> None:
        self.name, self._races = name, races
        races.clock(name)

    def wait_stream(self, other: Stream) -> None:
        self._races.wait(self.name, self._races.clock(other.name))

    def wait_event(self, event: Event) -> None:
        self._races.wait(self.name, event.clock)

    def synchronize(self) -> None:
        self._races.wait(HOST, self._races.clock(self.name))


class Event:
    """A moment of a stream; waiting for one that was never recorded is waiting for nothing."""

    def __init__(self, races: Races) -> None:
        self._races = races
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict(self._races.clock((stream or torch.cuda.current_stream()).name))  # type: ignore[union-attr]

    def synchronize(self) -> None:
        self._races.wait(HOST, self.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or torch.cuda.current_stream()).wait_event(self)  # type: ignore[arg-type]


class _Copies(TorchFunctionMode):
    """Writes down who copies what: a copy from or to the device is queued on the current stream, and waited for unless
    it is non-blocking.
    """

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is torch.Tensor.copy_:
            self._copy(args[0], args[1], keywords.get("non_blocking", len(args) > 2 and args[2]))
        return func(*args, **keywords)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        races = self._races
        to, of = (("device" if races.is_on_device(tensor) else "host") for tensor in (target, source))
        what = f"the copy of {source.numel()} elements of the {of} to the {to}"
        if to == of == "host":
            races.use(what, actor=HOST, reads=[source], writes=[target])
            return
        races.queue(what, reads=[source], writes=[target])
        if not non_blocking:
            races.blocking.append(what)
            torch.cuda.current_stream().synchronize()


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """First and last address of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
