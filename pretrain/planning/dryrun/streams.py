"""Stand-ins for CUDA's streams and events, which keep the order that real ones would: that of the program, of waits, and
of autograd's engine.

A node of the graph runs backward on the stream on which its forward op ran: nodes are numbered as they are made, so the
numbers at which streams were switched tell it. Where a gradient passes from a node to one on another stream, the engine
has that stream wait, and announces the gradient to the allocator; gradients of several nodes are summed on the stream of
their reader; the caller's stream waits at the end for those of the graph's leaves, and no others
(torch/csrc/autograd/engine.cpp and input_buffer.cpp, 2.11 to 2.13).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

Clock: TypeAlias = dict[str, int]
"""Progress of each stream and the host, as far as somebody knows it."""
HOST = "the host"

_engine = Variable._execution_engine
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_current_node: Callable[[], Any] = torch._C._current_autograd_node


class Order:
    """Order of actors, which are streams and the host, by their waits for each other. Nothing is kept of it: pools of
    memory need to know only which stream is current.
    """

    def clock(self, actor: str) -> Clock:
        """A copy of what an actor knows now: for an event, which keeps it."""
        return {}

    def wait(self, actor: str, known: Clock) -> None:
        """Have an actor go on only after all that is known."""

    def wait_for(self, actor: str, other: str) -> None:
        """Have an actor go on only after all that another was asked for so far."""

    def actors(self) -> tuple[str, ...]:
        """All streams that were heard of, and the host."""
        return ()


class Streams:
    """A device's streams, of one process.

    Attributes:
        order: told of all waits.
        on_handed_over: called with each gradient that passes to a node on another stream, and that stream's name.
    """

    def __init__(self, on_wait: Callable[[str], None] = lambda name: None) -> None:
        """
        Args:
            on_wait: called with the name of each call by which the host waits for a stream or an event.
        """
        self.order = Order()
        self.on_wait = on_wait
        self.on_handed_over: Callable[[Tensor, str], None] = lambda gradient, stream: None
        self._names = (f"stream {number}" for number in count(1))
        self.default = _Stream(self, name="the default stream")
        # Streams that a block of code has chosen, each with the node whose backward pass it is in.
        self._chosen: list[tuple[_Stream, Any]] = [(self.default, None)]
        # Numbers of nodes from which on they belong to a stream.
        self._from: list[int] = [0]
        self._streams: list[_Stream] = [self.default]
        # Of the last node that handed something over: the streams of gradients that are summed before the next runs.
        self._summed: tuple[Any, dict[int, _Stream]] = (None, {})
        # Streams of accumulators that were made in a pass.
        self._of_leaf: dict[Any, _Stream] = {}

    def current(self) -> _Stream:
        """The stream that the code which asks would launch on."""
        node = _identity(_current_node())
        stream, inside = self._chosen[-1]
        return stream if node == inside else self._of_node(_current_node())

    def launching(self, tensors: Sequence[Tensor]) -> _Stream:
        """The stream that an operation on these tensors is launched on."""
        node, of_gradients = self._summed
        if node is not None and node == _identity(_current_node()):
            for tensor in tensors:
                if (stream := of_gradients.get(_storage(tensor))) is not None:
                    return stream
        current = self.current()
        if torch.is_grad_enabled():
            self._begin(current)
        return current

    def redirections(self) -> dict[str, Any]:
        """Replacements by name, as of `parallel.machine.cpu.REDIRECTIONS`."""
        return {
            "torch.cuda.Stream": lambda *_, **__: _Stream(self),
            "torch.cuda.Event": lambda *_, **__: _Event(self),
            "torch.cuda.green_contexts.GreenContext.create": lambda **_: SimpleNamespace(Stream=lambda: _Stream(self)),
            "torch.cuda.stream": self._using,
            "torch.cuda.current_stream": lambda *_: self.current(),
            "torch.cuda.default_stream": lambda *_: self.default,
            "torch.autograd.Variable._execution_engine": _Engine(self),
        }

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for actor in self.order.actors():
            self.order.wait_for(HOST, actor)

    def run_backward(self, run: Callable[..., Any], roots: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        """A backward pass from these tensors, with the waits that the engine makes between streams."""
        caller, of_leaf_before = self.current(), self._of_leaf
        nodes = [node for root in roots if (node := _node_of(root)) is not None]
        leaves, hooks = self._watch(nodes)
        for node in nodes:
            self._hand_over(caller, self._of_node(node))
        try:
            return run(roots, *args, **options)
        finally:
            for hook in hooks:
                hook.remove()
            for stream in leaves:
                self._hand_over(stream, caller)
            self._of_leaf = of_leaf_before
            # The last nodes may have chosen others.
            self._begin(caller)

    @contextmanager
    def _using(self, stream: _Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        self._chosen.append((stream, _identity(_current_node())))
        self._begin(stream)
        try:
            yield
        finally:
            self._chosen.pop()
            self._begin(self.current())

    def _begin(self, stream: _Stream) -> None:
        """Nodes that are made from now on are this stream's."""
        if self._streams[-1] is not stream:
            self._from.append(_sequence_nr())
            self._streams.append(stream)

    def _of_node(self, node: Any) -> _Stream:
        if node is None:
            return self._chosen[0][0]
        if not node.next_functions and _is_accumulator(node):
            return self._of_leaf.get(node, self.default)
        return self._streams[bisect_right(self._from, node._sequence_nr()) - 1]

    def _watch(self, roots: Sequence[Any]) -> tuple[list[_Stream], list[Any]]:
        """Streams of the leaves of a graph, and hooks on all nodes that hand gradients to another stream."""
        found, waiting = {}, list(roots)
        leaves: dict[Any, int] = {}
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            number = node._sequence_nr()
            found[node] = [after for after, _ in node.next_functions]
            for after in found[node]:
                if after is not None and not after.next_functions and _is_accumulator(after):
                    # It is made where a leaf is first used. Those of weights are older, of the time when DDP was made.
                    leaves[after] = min(number, leaves.get(after, number))
                elif after is not None:
                    waiting.append(after)
        self._of_leaf = {
            leaf: self._streams[bisect_right(self._from, number) - 1]
            for leaf, number in leaves.items()
            if not isinstance(leaf.variable, torch.nn.Parameter)
        }
        hooks = [
            node.register_hook(self._handing_over(node, after))
            for node, after in found.items()
            if any(one is not None and self._of_node(one) is not self._of_node(node) for one in after)
        ]
        # Those of Python may run forward passes again, whose first nodes are made before an operation is seen.
        hooks += [node.register_prehook(self._running(node)) for node in found if isinstance(node, BackwardCFunction)]
        ends = [*leaves, *(node for node, after in found.items() if not after)]
        return list(dict.fromkeys(map(self._of_node, ends))), hooks

    def _running(self, node: Any) -> Callable[[Any], None]:
        stream = self._of_node(node)
        return lambda _: self._begin(stream)

    def _handing_over(self, node: Any, after: Sequence[Any]) -> Callable[..., None]:
        # The hook holds no node, which would hold the hook, and what it keeps for backward.
        identity, source = _identity(node), self._of_node(node)
        targets = [None if one is None else self._of_node(one) for one in after]

        def hand_over(gradients: Any, _: Any) -> None:
            summed: dict[int, _Stream] = {}
            for gradient, target in zip(gradients, targets, strict=True):
                if gradient is not None and target is not None and target is not source:
                    self._hand_over(source, target)
                    self.on_handed_over(gradient, target.name)
                    summed[_storage(gradient)] = target
            self._summed = (identity, summed)

        return hand_over

    def _hand_over(self, source: _Stream, target: _Stream) -> None:
        if source is not target:
            self.order.wait_for(target.name, source.name)


class _Stream:
    """A CUDA stream: does one thing after the other."""

    def __init__(self, streams: Streams, *, name: str = "") -> None:
        self._streams = streams
        self.name = name or next(streams._names)

    def wait_stream(self, other: _Stream) -> None:
        self._streams.order.wait_for(self.name, other.name)

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = _Event(self._streams) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._streams.on_wait("Stream.synchronize")
        self._streams.order.wait_for(HOST, self.name)


class _Event:
    """A CUDA event: all that a stream was asked for before. Who waits for one that was never recorded, does not wait."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._known: Clock = {}

    def record(self, stream: _Stream | None = None) -> None:
        stream = self._streams.current() if stream is None else stream
        self._known = self._streams.order.clock(stream.name)

    def wait(self, stream: _Stream | None = None) -> None:
        stream = self._streams.current() if stream is None else stream
        self._streams.order.wait(stream.name, self._known)

    def synchronize(self) -> None:
        self._streams.on_wait("Event.synchronize")
        self._streams.order.wait(HOST, self._known)


class _Engine:
    """Autograd's engine, as Python calls it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def run_backward(self, tensors: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        return self._streams.run_backward(_engine.run_backward, tensors, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(_engine, name)


def _identity(node: Any) -> Any:
    """A node's name and number: PyTorch makes Python's object for it anew."""
    return None if node is None else (node.name(), node._sequence_nr())


def _is_accumulator(node: Any) -> bool:
    return bool(node.name().endswith("AccumulateGrad"))


def _node_of(root: Tensor) -> Any:
    if root.grad_fn is not None or not root.requires_grad:
        return root.grad_fn
    return torch.autograd.graph.get_gradient_edge(root).node


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
