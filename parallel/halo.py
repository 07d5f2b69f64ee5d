"""Halos across the cuts of a sequence: the tokens before each stretch that a rank holds, from the ranks that hold them.

Context parallelism gives a rank two slices of a sequence (`parallel.context`), and tensor parallelism cuts what follows
each other there into equal parts; so a rank holds one or two stretches of consecutive tokens. Which tokens go where
follows from sizes alone: one all-to-all of fixed parts, in which every token that is asked for is sent once per stretch.

Legend: CP context- and TP tensor-parallel ranks, t tokens of a sequence on a rank, b sequences, w tokens of a halo.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megamem.chunk.halo import UNCUT, Halo
from parallel.exchange import linear
from parallel.layout import halo_requests, stretches


def halo_of(group: dist.ProcessGroup, *, tensor: int) -> Halo:
    """The halo over a group of `tensor` x CP ranks, tensor-parallel ones fastest."""
    return UNCUT if group.size() == 1 else CutSequences(group, tensor=tensor)


def hidden_halo(groups: ProcessGroupCollection) -> Halo:
    """The halo of hidden states between tensor-parallel regions, over the axes that cut them."""
    tensor, context = groups.tp.size(), groups.cp.size()
    if context == 1:
        return halo_of(groups.tp, tensor=tensor)
    return halo_of(groups.cp if tensor == 1 else groups.tp_cp, tensor=tensor)


@dataclass(frozen=True)
class _Plan:
    """One rank's part in the exchange.

    Attributes:
        sends: tokens of ours that a receiver asks for, by receiver and stretch of it.
        send_counts, receive_counts: numbers of tokens, by rank.
        places: places of the tokens that come, in the order of their senders, in the halos of our stretches one after
            the other.
    """

    sends: tuple[tuple[int, ...], ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    places: tuple[int, ...]


@lru_cache(maxsize=64)
def _plan(rank: int, num_tokens: int, width: int, tensor: int, context: int) -> _Plan:
    sizes = {"tensor": tensor, "context": context}
    size = tensor * context
    requests = [halo_requests(each, num_tokens, width, **sizes) for each in range(size)]
    sends, send_counts = [], [0] * size
    for receiver, of_stretches in enumerate(requests):
        for asked in of_stretches:
            own = tuple(held for owner, held, _ in asked if owner == rank)
            if own:
                sends.append(own)
                send_counts[receiver] += len(own)
    places: list[list[int]] = [[] for _ in range(size)]
    for number, asked in enumerate(requests[rank]):
        for owner, _, place in asked:
            places[owner].append(number * width + place)
    return _Plan(
        tuple(sends),
        tuple(send_counts),
        tuple(len(each) for each in places),
        tuple(place for each in places for place in each),
    )


class CutSequences:
    """See `megamem.chunk.halo.Halo`; every rank of the group holds equally many tokens."""

    def __init__(self, group: dist.ProcessGroup, *, tensor: int) -> None:
        self.group, self.tensor, self.context = group, tensor, group.size() // tensor
        self._indices: dict[tuple[int, int, torch.device], tuple[tuple[Tensor, ...], Tensor]] = {}

    def extended(self, x: Tensor, width: int) -> tuple[Tensor, ...]:
        """See `megamem.chunk.halo.Halo.extended`. Collective, backward too."""
        sizes = {"tensor": self.tensor, "context": self.context}
        num_tokens = len(x)
        own = stretches(self.group.rank(), num_tokens, **sizes)
        plan = _plan(self.group.rank(), num_tokens, width, self.tensor, self.context)
        sends, places = self._on(x.device, plan, num_tokens, width)

        def reach(x: Tensor) -> Tensor:
            sent = torch.cat([x[each] for each in sends]) if sends else x[:0]
            received = self._exchange(sent, plan.send_counts, plan.receive_counts)
            halos = x.new_zeros(len(own) * width, *x.shape[1:])
            halos[places] = received
            return halos

        def give_back(grad: Tensor) -> Tensor:
            received = self._exchange(grad[places], plan.receive_counts, plan.send_counts)
            # A number and not x: what backward names stays in memory until then.
            out = grad.new_zeros(num_tokens, *grad.shape[1:])
            # No two tokens of one stretch's halo are the same: their sum has an order.
            for each, part in zip(sends, received.split([len(each) for each in sends]), strict=True):
                out[each] += part
            return out

        halos = linear(x, reach, give_back).view(len(own), width, *x.shape[1:])
        ends = [stretch.offset + stretch.stop - stretch.start for stretch in own]
        return tuple(
            torch.cat((halo, x[stretch.offset : end])) for halo, stretch, end in zip(halos, own, ends, strict=True)
        )

    def _on(self, device: torch.device, plan: _Plan, num_tokens: int, width: int) -> tuple[tuple[Tensor, ...], Tensor]:
        key = num_tokens, width, device
        if key not in self._indices:
            sends = tuple(torch.tensor(each, device=device) for each in plan.sends)
            self._indices[key] = sends, torch.tensor(plan.places, dtype=torch.int64, device=device)
        return self._indices[key]

    def _exchange(self, x: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]) -> Tensor:
        out = x.new_empty(sum(receive_counts), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(receive_counts), list(send_counts), group=self.group)
        return out
