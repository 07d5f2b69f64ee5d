"""Exchanges that are linear in what they are given: backward needs none of it, so none may stay until then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context import gather_sequence
from parallel.halo import CutSequences


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


EXCHANGES: dict[str, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    "halo": lambda x, group: torch.cat(CutSequences(group, tensor=1).extended(x, 3)),
    "sequence": gather_sequence,
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_what_is_handed_over_is_free_before_backward(name: str, group: dist.ProcessGroup) -> None:
    weights = torch.ones(4, requires_grad=True)
    given = torch.arange(32.0).view(8, 1, 4) * weights
    out = EXCHANGES[name](given, group)
    left = weakref.ref(given)
    del given
    assert left() is None
    out.sum().backward()
    assert torch.equal(weights.grad, torch.arange(32.0).view(8, 4).sum(0))
