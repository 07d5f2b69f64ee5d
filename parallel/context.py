"""Context parallelism: sequences cut over ranks, and attention across the cuts.

A sequence is cut into 2 CP slices, of which rank r holds slices r and 2 CP - 1 - r, one after the other. That is
Megatron's order: causal attention has little to look back at near the start and much near the end, and so every rank
has the same work. Megatron cuts its rotary embedding alike, and sums gradients over data and context parallelism
together.

Attention is the one place where a rank needs the tokens of others, and there are three ways (`WAYS`): keys and values
are gathered here, in `parallel.context_heads` all tokens of some heads come together, and in `parallel.context_ring`
keys and values pass by.

Legend: CP ranks of the group, s tokens of a sequence, c = s / 2 CP tokens of a slice, t = 2 c tokens of a rank,
b sequences, n query heads and g key/value heads of this tensor-parallel rank, d head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megamem.attention.blockwise import tiled_attention
from megamem.attention.core import SdpaCoreAttention
from megamem.attention.documents import Documents, ScoreTile, Slice
from parallel.exchange import linear, sum_in_order


def own_tokens(batch: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """This rank's part of a microbatch, by name: from [b, s] each to [b, t]. The batch stays as it is."""
    if group.size() == 1:
        return dict(batch)

    def own(x: Tensor) -> Tensor:
        slices = own_slices(group, x.shape[1] // group.size())
        return torch.cat([x[:, each.start : each.stop] for each in slices], dim=1)

    return {name: own(x) for name, x in batch.items()}


def own_slices(group: dist.ProcessGroup, num_tokens: int, rank: int | None = None) -> tuple[Slice, Slice]:
    """The two slices of the t = `num_tokens` tokens that a rank of the group, or this one, holds."""
    size, length = group.size(), num_tokens // 2
    rank = group.rank() if rank is None else rank
    early, late = rank * length, (2 * size - 1 - rank) * length
    return Slice(early, early + length), Slice(late, late + length, offset=length)


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tokens of all ranks in the order of the sequence: from [t, ...] to [s, ...]. Collective, backward too."""

    def gather(x: Tensor) -> Tensor:
        by_rank = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(by_rank, x.contiguous(), group=group)
        return sequence_order(by_rank, group.size())

    def scatter(grad: Tensor) -> Tensor:
        to_ranks = rank_order(grad, group.size())
        from_ranks = torch.empty_like(to_ranks)
        dist.all_to_all_single(from_ranks, to_ranks, group=group)
        return sum_in_order(from_ranks.unflatten(0, (group.size(), -1)), 0)

    return linear(x, gather, scatter)


class ContextAttention(SdpaCoreAttention):
    """Causal attention over sequences that are cut over the ranks of a context-parallel group: what all ways share."""

    def __init__(self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection, **megatron: Any) -> None:
        """See `SdpaCoreAttention`; `pg_collection.cp` is the group."""
        super().__init__(config, pg_collection=pg_collection, **megatron)
        self.group = pg_collection.cp

    def documents(self, bounds: Tensor | None, query: Tensor) -> Documents:
        """The documents of whole sequences, of which this rank has the queries [t, ...]."""
        return Documents.of(bounds, query.shape[0] * self.group.size())


class GatheredAttention(ContextAttention):
    """All ranks gather the keys and values of the whole sequence, in one collective.

    A rank's slice of queries attends to the keys before it, and causally to its own. Backward sends each gradient to
    the rank of its token, where the contributions are added in the order of the ranks, in at least fp32: as many bytes
    as a reduce-scatter, and a rounding that no communication library decides.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None) -> Tensor:
        """Causal attention, [t, b, n d], of this rank's tokens [t, b, n or g, d]. Collective."""
        keys, values = gather_sequence(torch.stack((key, value), 1), self.group).unbind(1)
        documents = self.documents(bounds, query)
        tiles: list[ScoreTile] = []
        for queries in own_slices(self.group, query.shape[0]):
            own = Slice(queries.start, queries.stop, offset=queries.start)
            for of_keys in (Slice(0, queries.start), own):
                tiles += documents.tiles(queries, of_keys)
        return tiled_attention(query, keys, values, tiles, self.scale_of(query)).flatten(2)


def sequence_order(x: Tensor, num_ranks: int) -> Tensor:
    """[s, ...], from tokens in the order of the ranks that hold them to that of the sequence."""
    early, late = x.unflatten(0, (num_ranks, 2, -1)).unbind(1)
    return torch.cat((early, late.flip(0))).flatten(0, 1)


def rank_order(x: Tensor, num_ranks: int) -> Tensor:
    """The inverse of `sequence_order`."""
    early, late = x.unflatten(0, (2, num_ranks, -1)).unbind(0)
    return torch.stack((early, late.flip(0)), 1).flatten(0, 2)
