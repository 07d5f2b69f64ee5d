"""Attention across cut sequences by exchanging tokens for heads (DeepSpeed-Ulysses, arXiv 2309.14509).

Before attention each rank gets all tokens of an equal part of the query heads and of the key/value heads that these
read, in one all-to-all; after it the outputs go back in another. Where there are fewer key/value heads than ranks, each
of them is sent to the CP / g ranks whose queries read it; otherwise CP divides g. Backward is the two exchanges
reversed, and the gradients of a head that was sent to several ranks are added up in the order of the ranks.

Legend: see `parallel.context`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.attention.core import causal_attention
from parallel.context import ContextAttention, rank_order, sequence_order
from parallel.exchange import linear


class HeadAttention(ContextAttention):
    """Every rank attends over whole sequences, for n / CP of the query heads."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None) -> Tensor:
        """Causal attention, [t, b, n d], of this rank's tokens [t, b, n or g, d]. Collective."""
        size = self.group.size()
        parts = [_by_rank(x, size) for x in (query, key, value)]
        whole = _to_heads(torch.cat(parts, 3), self.group)
        own_query, own_key, own_value = whole.split([part.shape[3] for part in parts], 2)
        out = causal_attention(own_query, own_key, own_value, self.scale_of(query), bounds)
        return _to_tokens(out, self.group)


def _by_rank(x: Tensor, size: int) -> Tensor:
    """The heads that go to each rank, [t, b, CP, heads of one, d], of [t, b, heads, d]."""
    t, b, heads, d = x.shape
    if heads % size == 0:
        return x.unflatten(2, (size, -1))
    assert size % heads == 0, "the configuration is refused before"
    # In backward the gradients are added up, by one sum that rounds once.
    return x.unsqueeze(3).expand(t, b, heads, size // heads, d).reshape(t, b, size, 1, d)


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From this rank's tokens of all ranks' heads [t, b, CP, h, d] to all tokens of its own [s, b, h, d]. Collective."""
    return linear(x, partial(_bring_tokens, group), partial(_bring_heads, group))


def _to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From all tokens of this rank's heads [s, b, h d] to its own tokens of all heads [t, b, CP h d]. Collective."""
    back = linear(x.unsqueeze(2), partial(_bring_heads, group), partial(_bring_tokens, group))
    return back.flatten(2)


def _bring_tokens(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """[s, b, ...] of [t, b, CP, ...]."""
    return sequence_order(_exchange(x.movedim(2, 0), group).flatten(0, 1), group.size())


def _bring_heads(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """[t, b, CP, ...] of [s, b, ...]."""
    return _exchange(rank_order(x, group.size()).unflatten(0, (group.size(), -1)), group).movedim(0, 2)


def _exchange(to_ranks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's tensors for each rank, [CP, ...], for those that each has for this one."""
    to_ranks = to_ranks.contiguous()
    from_ranks = torch.empty_like(to_ranks)
    dist.all_to_all_single(from_ranks, to_ranks, group=group)
    return from_ranks
