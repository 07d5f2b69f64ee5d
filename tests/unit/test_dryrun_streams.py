"""Streams of the nodes of a graph, of which backward runs on the one that forward ran on: gradients pass between streams
where a branch begins and ends, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pretrain.planning.dryrun.streams import Streams


class Looked(torch.autograd.Function):
    """The identity, whose backward pass has work on a stream of its own, as a lookup has gradients of tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Any) -> Tensor:
        ctx.stream = stream
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch.cuda.stream(ctx.stream):
            pass
        return grads[0], None


@pytest.fixture
def handed_over() -> Iterator[list[str]]:
    """The streams that gradients pass to, while stand-ins take CUDA's place."""
    streams, found = Streams(), []
    streams.on_handed_over = lambda _, stream: found.append(stream)
    with ExitStack() as stack:
        for name, stand_in in streams.redirections().items():
            stack.enter_context(patch(name, stand_in, create=name.startswith("torch.cuda.green")))
        yield found


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_pass_to_a_branchs_stream_and_back_in_every_block_and_pass(
    handed_over: list[str], recomputed: bool
) -> None:
    side, third = torch.cuda.Stream(), torch.cuda.Stream()

    def block(x: Tensor) -> Tensor:
        # Views, which allocate nothing that would be seen.
        for _ in range(3):
            x = x.view_as(x)
        with torch.cuda.stream(side):
            branch = Looked.apply(x * 2, third)
        return x + branch

    for _ in range(2):
        hidden = torch.ones(2, requires_grad=True)
        for _ in range(3):
            hidden = checkpoint(block, hidden, use_reentrant=True) if recomputed else block(hidden)
        hidden.sum().backward()
    assert handed_over == 2 * 3 * ["stream 1", "the default stream"]
