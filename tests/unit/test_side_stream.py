"""The memory on a stream of its own: who waits for whom, in which order. The streams are stand-ins; no GPU has run
this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.chunk.inputs import Inputs
from megamem.chunk.side_stream import SideStream
from tests.microbatch import some_inputs


class Stream:
    """A CUDA stream that writes down who waits for it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events in order; `main` is the current stream wherever no other was entered."""
    log: list[str] = []
    current = [Stream("main", log)]

    @contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def record(tensor: Tensor, stream: Stream) -> None:
        log.append(f"a tensor of {tensor.numel()} is kept for {stream.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return log


def test_the_branch_waits_for_its_input_and_the_caller_for_its_output(log: list[str]) -> None:
    def branch(x: Tensor, inputs: Inputs) -> Tensor:
        log.append(f"the branch runs on {torch.cuda.current_stream().name}")
        return x[:2].sum(0, keepdim=True)

    side: Any = Stream("side", log)
    join = SideStream(side).start(branch, torch.ones(3, 1), some_inputs(torch.ones(5, 1)))
    log.append("the feed-forward runs on " + torch.cuda.current_stream().name)
    assert float(join()) == 2
    assert log == [
        "side waits for main",
        "the branch runs on side",
        "a tensor of 3 is kept for side",
        "a tensor of 10 is kept for side",
        "the feed-forward runs on main",
        "main waits for side",
        "a tensor of 1 is kept for main",
    ]


def test_without_a_stream_the_branch_runs_when_it_is_joined(log: list[str]) -> None:
    join = SideStream(None).start(lambda x, _: x + len(log), torch.zeros(1), some_inputs(torch.zeros(1, 1)))
    log.append("the feed-forward")
    assert float(join()) == 1
