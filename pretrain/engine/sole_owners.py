"""Weights of which no other rank has a copy: nothing to gather, and no gradients to add up.

Megatron calls its collectives for a group of one rank, too. NCCL finds nothing to do in place; gloo copies weights and
gradients through buffers of their size, tables as well, with threads that the step needs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from pretrain.engine.tables.bf16_gradients import Bf16Part, Reduction


def spare_sole_owners(wrapped: DistributedDataParallel) -> None:
    """Have the parts that weights come in call no collective where their group is this rank."""
    for part in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        if part.intra_distributed_optimizer_instance_size > 1:
            continue
        part.start_param_sync = partial(_start_param_sync, part)
        # Theirs calls none, and knows the stream of its gradients.
        if not isinstance(part, Bf16Part):
            part.start_grad_sync = partial(_start_grad_sync, part)


def _start_param_sync(part: Any, force_sync: bool = False) -> None:
    part.param_gather_dispatched = True


def _start_grad_sync(part: Any, force_all_reduce: bool | None = False) -> None:
    """Do what Megatron's does beside the collective."""
    if part.is_first_batch and part.grad_reduce_handle is not None:
        return
    assert part.grad_reduce_handle is None
    settings = part.ddp_config
    if settings.check_for_nan_in_grad or settings.check_for_large_grads:
        part.check_grads(
            check_for_nan_or_inf=settings.check_for_nan_in_grad, check_for_large=settings.check_for_large_grads
        )
    for bucket in part.buckets:
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor
    part.grad_reduce_handle = Reduction(None) if settings.overlap_grad_reduce else None
