"""Attention across cut sequences by keys and values that go around a ring (Ring Attention, arXiv 2310.01889).

In CP steps every rank sees the keys and values of all, those of one rank at a time, while the next ones are under way;
outputs are put together by their normalisers (`megamem.attention`). Backward sends keys and values around once more.
The gradients of a rank's keys and values start at the next rank, collect in at least fp32 what each adds, and come home
last, where the rank's own part joins: the order of the sum is that of the ring, on every run.

In a step rank r sees slices j and 2 CP - 1 - j of rank j. Those that lie before both of its own are seen by both, those
between its own by the late one: two squares of c x c in every step and on every rank, but for the first step, which has
one and the two diagonals. A rank holds its slices side by side, so each step's scores are one tile, unless documents
are separate.

Legend: see `parallel.context`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.attention.blockwise import PartialAttention, PartialGradients
from megamem.attention.documents import Documents, ScoreTile
from parallel.context import ContextAttention, own_slices


class RingAttention(ContextAttention):
    """A rank holds its own keys and values, those that it attends to, and those that are coming."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None) -> Tensor:
        """Causal attention, [t, b, n d], of this rank's tokens [t, b, n or g, d]. Collective."""
        out: Tensor = _Ring.apply(
            query, torch.stack((key, value)), self.documents(bounds, query), self.group, self.scale_of(query)
        )
        return out.flatten(2)


class _Ring(torch.autograd.Function):
    """From query [t, b, n, d], and key and value stacked [2, t, b, g, d], to the output [t, b, n, d]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, own: Tensor, documents: Documents, group: dist.ProcessGroup, scale: float
    ) -> Tensor:
        partial = PartialAttention(query, scale)
        for source, (keys, values) in _passing_by(own, group):
            partial.add(keys, values, _tiles(documents, group, source, query.shape[0]))
        out = partial.out
        ctx.save_for_backward(query, own, out, partial.normaliser)
        ctx.documents, ctx.group, ctx.scale = documents, group, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None]:
        query, own, out, normaliser = ctx.saved_tensors
        group = ctx.group
        gradients = PartialGradients(query, out, normaliser, grads[0], ctx.scale)
        own_grad: Tensor | None = None
        coming: _Transfer | None = None
        for source, (keys, values) in _passing_by(own, group):
            grad = gradients.add(keys, values, _tiles(ctx.documents, group, source, query.shape[0]))
            if own_grad is None:
                own_grad = grad
                continue
            # The gradient that the rank before has collected for the same keys.
            coming = _Transfer(grad if coming is None else coming.received() + grad, group)
        assert own_grad is not None
        if coming is not None:
            own_grad = coming.received() + own_grad
        return gradients.query, own_grad.to(own.dtype), None, None, None


def _passing_by(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """The ranks and their keys and values, from this one backwards; the next ones travel while these are used."""
    rank, size, keys = group.rank(), group.size(), own
    for step in range(size):
        transfer = _Transfer(keys, group) if step + 1 < size else None
        yield (rank - step) % size, keys
        if transfer is not None:
            keys = transfer.received()


def _tiles(documents: Documents, group: dist.ProcessGroup, source: int, num_tokens: int) -> Iterator[ScoreTile]:
    """The scores between this rank's queries and the keys of rank `source`."""
    if documents.bounds is None:
        yield _step_tile(group.rank(), source, num_tokens)
        return
    for queries in own_slices(group, num_tokens):
        for keys in own_slices(group, num_tokens, source):
            yield from documents.tiles(queries, keys)


def _step_tile(rank: int, source: int, num_tokens: int) -> ScoreTile:
    """The scores of whole sequences between a rank's queries and the keys of rank `source`."""
    both, early, late = slice(0, num_tokens), slice(0, num_tokens // 2), slice(num_tokens // 2, num_tokens)
    if source < rank:
        return ScoreTile(slice(None), both, early, causal=False)
    if source > rank:
        return ScoreTile(slice(None), late, both, causal=False)
    # The late slice comes after the early one, as in the sequence.
    return ScoreTile(slice(None), both, both, causal=True)


class _Transfer:
    """A tensor on its way to the next rank, and one of the same shape from the rank before."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        # Kept until it has left.
        self._sent = x.contiguous()
        self._coming = torch.empty_like(self._sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group),
                dist.P2POp(dist.irecv, self._coming, before, group),
            ]
        )

    def received(self) -> Tensor:
        """The tensor from the rank before; on a GPU its stream waits, and not the host."""
        for work in self._works:
            work.wait()
        return self._coming
