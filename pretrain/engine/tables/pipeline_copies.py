"""The gradients of parameters that every pipeline stage holds a copy of.

A bank that layers of several stages read is held by each of these, so that no row travels between stages. After a step's
last backward pass each copy has the gradient of its own stage's layers, and the reduction over the replicas has left on
every rank its share of that, the same share on all stages (`megamem.parameters.declaration.mark_copy`). The shares are added up:
the table's gradient, divided by the replicas, once per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megamem.parameters.declaration import is_on_every_stage
from pretrain.engine.parts import parts_of
from pretrain.engine.tables.bf16_gradients import windows
from pretrain.engine.tables.row_gradients import add_up_rows


def finalize_with_copies(
    chunks: list[DistributedDataParallel],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    **megatron: Any,
) -> None:
    """Megatron's `finalize_model_grads`, the sums over stages, and those of rows that were read. Collective."""
    finalize_model_grads(chunks, num_tokens, pg_collection=pg_collection, **megatron)
    assert pg_collection is not None
    sum_over_stages(chunks, pg_collection.pp)
    # Megatron has left the number of all ranks there.
    add_up_rows(chunks, num_tokens, pg_collection.pp)


@torch.no_grad()
def sum_over_stages(chunks: list[DistributedDataParallel], stages: dist.ProcessGroup) -> None:
    """Add up this rank's shares of the gradients of parameters that every stage holds. Collective over the stages."""
    if stages.size() > 1:
        for share in _shares(chunks):
            for part in windows(share) if share.dtype == torch.bfloat16 else (share,):
                # Sums of bf16 in bf16 would lose what is small beside the sum so far.
                sums = part.float()
                dist.all_reduce(sums, group=stages)
                if sums is not part:
                    part.copy_(sums)


def _shares(chunks: list[DistributedDataParallel]) -> Iterator[Tensor]:
    """This rank's share of each such gradient, in the same order on every stage."""
    for chunk in chunks:
        for reduced_together in parts_of(chunk):
            for bucket in reduced_together.buckets:
                if any(is_on_every_stage(parameter) for parameter in bucket.params_list):
                    replicas = reduced_together.intra_distributed_optimizer_instance_group
                    yield bucket.grad_data.chunk(replicas.size())[replicas.rank()]
