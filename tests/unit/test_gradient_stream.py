"""Gradients of tables on a stream of their own: who waits for whom, what is held, and the bits. The streams are
stand-ins; no GPU has run this.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common.gradient_stream import GradientStream
from kernels.common.joined_lookups import Lookup
from kernels.common.main_grad import MainGradient
from kernels.common.table_gradient import give_gradient
from kernels.select import select_kernels


class Stream:
    """A CUDA stream that writes down who waits for it, and what it is asked for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.num_events = 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.num_events += 1
        return f"{self.name} at {self.num_events}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events in order; `memory` is the current stream wherever no other was entered."""
    log: list[str] = []
    current = [Stream("memory", log)]

    @contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", enter)
    return log


def lookup(log: list[str], stream: GradientStream, *names: str) -> weakref.ref[Tensor]:
    """Additions to the tables of these names, by one tensor of ids."""
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for name in names:

        def accumulate(*tensors: Tensor | None, name: str = name) -> None:
            assert tensors[1] is ids
            log.append(f"{name} on {torch.cuda.current_stream().name}")

        stream.add(Lookup(accumulate, ids, torch.zeros(1), torch.zeros(1), None), torch.zeros(1))
    return weakref.ref(ids)


def test_one_lookup_is_under_way_and_its_operands_are_held(log: list[str]) -> None:
    side: Any = Stream("gradients", log)
    stream = GradientStream(side)
    first = lookup(log, stream, "values", "pre-values")
    assert first() is not None
    second = lookup(log, stream, "values")
    assert first() is None
    assert second() is not None
    stream.wait()
    assert second() is None
    assert log == [
        "gradients waits for memory",
        "values on gradients",
        "gradients waits for memory",
        "pre-values on gradients",
        # Before the first's memory is used again, whose owner is the stream that handed it over.
        "memory waits for gradients at 1",
        "memory waits for gradients at 2",
        "gradients waits for memory",
        "values on gradients",
        "memory waits for gradients",
        "memory waits for gradients at 3",
    ]


def test_gradients_have_the_bits_of_those_in_line(log: list[str]) -> None:
    """Two tables read by the same ids, twice."""
    torch.manual_seed(1)
    kernels = select_kernels(device_type="cpu")
    values, ids, coef = torch.randn(50, 8), torch.randint(50, (2, 16, 4)), torch.randn(2, 16, 4, 1)

    def gradients(stream: GradientStream | None) -> list[Tensor]:
        tables = [torch.nn.Parameter(values.clone()) for _ in range(2)]
        for table in tables:
            table.main_grad = torch.zeros_like(table)  # type: ignore[attr-defined]
            give_gradient(table, MainGradient(table, stream))
        x = torch.ones(16, 8, requires_grad=True)
        for rows, scores in zip(ids, coef, strict=True):
            products = kernels.gather_dot(tables[1], rows, x)
            kernels.gather_sum(tables[0], rows, scores * products).square().sum().backward()
        return [table.main_grad for table in tables]  # type: ignore[attr-defined]

    side: Any = Stream("gradients", log)
    for beside, in_line in zip(gradients(GradientStream(side)), gradients(None), strict=True):
        assert beside.abs().sum() > 0
        assert torch.equal(beside, in_line)
    # Values and pre-values of two lookups, and the release of the first.
    assert len([line for line in log if line == "gradients waits for memory"]) == 4
    assert len([line for line in log if "at" in line]) == 2
