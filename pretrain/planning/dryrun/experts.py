"""Routing of a mixture's tokens in a dry run: to all experts alike, as a balanced router would send them.

Shapes of a mixture depend on data, of which a dry run has none. Sizes are decided here, on the host, and all else is
Megatron's own: what is gathered, permuted, sent, computed and kept.

Legend: T tokens of this rank, E experts of which K are used by a token, G ranks that share them, n = E / G on each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

DISPATCHER = "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher.preprocess"
"""Megatron's method that `balanced` takes the place of."""


def balanced(dispatcher: Any, routing_map: Tensor) -> Any:
    """Counts of tokens by expert, [n], and the sizes of all parts that ranks send each other: as numbers of the host.

    Every rank sends floor(T K / E) tokens to each expert, and one more to the first T K mod E.

    Args:
        dispatcher: dispatcher of a layer, whose sizes are set.
        routing_map: [T, E], without data.
    """
    num_ranks, num_local = dispatcher.ep_size, dispatcher.num_local_experts
    dispatcher.num_out_tokens = routing_map.size(0) * dispatcher.config.moe_router_topk
    by_expert = np.full(dispatcher.num_experts, dispatcher.num_out_tokens // dispatcher.num_experts)
    by_expert[: dispatcher.num_out_tokens % dispatcher.num_experts] += 1
    if num_ranks > 1:
        # Ranks tell each other how many tokens they have for each expert.
        gather_from_sequence_parallel_region(routing_map.sum(dim=0).long(), group=dispatcher.tp_ep_group)
    first = dispatcher.local_expert_indices[0]
    of_mine = by_expert[first : first + num_local]
    if num_ranks > 1:
        dispatcher.input_splits = by_expert.reshape(num_ranks, num_local).sum(axis=1)
        dispatcher.output_splits = np.full(num_ranks, of_mine.sum())
        dispatcher._maybe_update_cuda_sync_point("before_ep_alltoall")
    else:
        dispatcher._maybe_update_cuda_sync_point("before_finish")
    if num_local > 1:
        # Chunks of tokens come by rank and leave by expert.
        dispatcher.num_global_tokens_per_local_expert = np.tile(of_mine, (num_ranks, 1))
        chunks = np.arange(num_ranks * num_local)
        dispatcher.sort_input_by_local_experts = chunks.reshape(-1, num_local).T.ravel()
        dispatcher.restore_output_by_local_experts = chunks.reshape(num_local, -1).T.ravel()
        dispatcher._maybe_update_cuda_sync_point("before_permutation_2")
    return of_mine * num_ranks
