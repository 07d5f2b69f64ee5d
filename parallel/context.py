"""Context parallelism: sequences cut over ranks, and attention across the cuts.

A sequence is cut into 2 CP slices, of which rank r holds slices r and 2 CP - 1 - r, one after the other. That is
Megatron's order: causal attention has little to look back at near the start and much near the end, and so every rank
has the same work. Megatron cuts its rotary embedding alike, and sums gradients over data and context parallelism
together.

For attention every rank gathers the keys and values of the whole sequence, and its two slices of queries attend to what
they may. Backward sends each gradient to the rank of its token, where the contributions are added in the order of the
ranks, in at least fp32: as many bytes as a reduce-scatter, and a rounding that no communication library decides.

Legend: CP ranks of the group, s tokens of a sequence, c = s / 2 CP tokens of a slice, t = 2 c tokens of a rank,
b sequences, n query heads and g key/value heads of this tensor-parallel rank, d head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from megamem.attention import SdpaCoreAttention, causal_attention
from parallel.exchange import linear, sum_in_order


def attention_core(groups: ProcessGroupCollection) -> type[SdpaCoreAttention]:
    """The attention core without Transformer Engine: PyTorch's, or across ranks where sequences are cut."""
    return ContextParallelAttention if groups.cp.size() > 1 else SdpaCoreAttention


def own_tokens(batch: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """This rank's part of a microbatch, by name: from [b, s] each to [b, t]. The batch stays as it is."""
    own: dict[str, Tensor] = get_batch_on_this_cp_rank(dict(batch), group)
    return own


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tokens of all ranks in the order of the sequence: from [t, ...] to [s, ...]. Collective, backward too."""

    def gather(x: Tensor) -> Tensor:
        by_rank = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(by_rank, x.contiguous(), group=group)
        return _sequence_order(by_rank, group.size())

    def scatter(grad: Tensor) -> Tensor:
        to_ranks = _rank_order(grad, group.size())
        from_ranks = torch.empty_like(to_ranks)
        dist.all_to_all_single(from_ranks, to_ranks, group=group)
        return sum_in_order(from_ranks.unflatten(0, (group.size(), -1)), 0)

    return linear(x, gather, scatter)


class ContextParallelAttention(SdpaCoreAttention):
    """Causal attention over sequences that are cut over the ranks of a context-parallel group.

    Per slice of queries this is one call of PyTorch's attention, with the keys up to the end of the slice and a causal
    mask that is aligned to their last. The alternative, full attention to what comes before and causal attention within
    the slice, has to merge two softmaxes by their normalisers, which PyTorch's public function does not return.
    """

    def __init__(self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection, **megatron: Any) -> None:
        """See `SdpaCoreAttention`; `pg_collection.cp` is the group."""
        super().__init__(config, pg_collection=pg_collection, **megatron)
        self.group = pg_collection.cp

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention, [t, b, n d], of this rank's tokens [t, b, n or g, d]. Collective."""
        keys, values = gather_sequence(torch.stack((key, value), 1), self.group).unbind(1)
        rank, size, length = self.group.rank(), self.group.size(), query.shape[0] // 2
        ends = ((rank + 1) * length, (2 * size - rank) * length)
        outs = [
            causal_attention(queries, keys[:end], values[:end], self.softmax_scale)
            for queries, end in zip(query.split(length), ends, strict=True)
        ]
        return torch.cat(outs)


def _sequence_order(x: Tensor, num_ranks: int) -> Tensor:
    """[s, ...], from tokens in the order of the ranks that hold them to that of the sequence."""
    early, late = x.unflatten(0, (num_ranks, 2, -1)).unbind(1)
    return torch.cat((early, late.flip(0))).flatten(0, 1)


def _rank_order(x: Tensor, num_ranks: int) -> Tensor:
    """The inverse of `_sequence_order`."""
    early, late = x.unflatten(0, (2, num_ranks, -1)).unbind(0)
    return torch.stack((early, late.flip(0)), 1).flatten(0, 2)
