"""Gradients of tables on a CUDA stream of their own, beside the rest of a backward pass.

They are the longest part of a lookup's backward pass, and nobody reads them before they are reduced over the replicas.
What else backward does, reductions and messages first, is needed by the blocks below and by other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.common.joined_lookups import Lookup


@dataclass(frozen=True)
class _Addition:
    """Work that was handed over.

    Attributes:
        caller: the stream that did.
        done: recorded behind the work.
        lookup: operands of the work, and ids that it is known by.
    """

    caller: torch.cuda.Stream
    done: torch.cuda.Event
    lookup: Lookup


class GradientStream:
    """Adds to the gradients of tables in the order in which it is asked to, so every run gives the same bits.

    One lookup's additions are under way at most. Their operands are held until the stream that handed them over has
    waited for the work. (`record_stream` would release them when the host sees that the work is done; the host runs
    ahead by whole layers, each of which would then take new memory.)
    """

    def __init__(self, stream: torch.cuda.Stream, *, of: object = None) -> None:
        """
        Args:
            stream: orders its work alone.
            of: an object that the stream needs to live; it is kept as long.
        """
        self._stream, self._of = stream, of
        self._under_way: list[_Addition] = []

    def add(self, lookup: Lookup, gradient: Tensor) -> None:
        """Add a lookup to a gradient, behind all that the current stream was asked for before.

        The current stream first waits for the additions of the lookup before, which read other `ids`. The operands are
        of its own memory.
        """
        caller = torch.cuda.current_stream()
        if any(addition.lookup.ids is not lookup.ids for addition in self._under_way):
            self._release()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            lookup.add_to(gradient)
        self._under_way.append(_Addition(caller, self._stream.record_event(), lookup))

    def run(self, work: Callable[[], None]) -> None:
        """Do work on this stream, behind all additions and all that the current stream was asked for before."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()

    def wait(self) -> None:
        """Have the current stream wait (not the host) for all additions so far."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._release()

    def _release(self) -> None:
        """Let the operands go, whose memory is handed out again in the order of the streams that they came from."""
        for addition in self._under_way:
            addition.caller.wait_event(addition.done)
        self._under_way.clear()
