"""The parts in which Megatron's DDP gathers weights and reduces gradients, where this engine does otherwise.

Megatron calls its collectives for a group of one rank, too. NCCL finds nothing to do in place; gloo copies weights and
gradients through buffers of their size, tables as well, with threads that the step needs. And gradients of tables may be
added up on a stream of their own, which a reduction has to wait for.
"""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from kernels.common.gradient_stream import GradientStream


class DdpPart(_ParamAndGradBucketGroup):
    """A part of the weights of one DDP, and of their gradients.

    Attributes:
        stream: stream that gradients are added up on, if it is not the current one.
    """

    stream: GradientStream | None = None
    grad_reduce_handle: Any

    @property
    def has_sole_owner(self) -> bool:
        """True if no other rank has a copy of the weights: nothing to gather, and no gradients to add up."""
        return bool(self.intra_distributed_optimizer_instance_size == 1)

    def start_param_sync(self, force_sync: bool = False) -> None:
        """See Megatron's. Collective over the replicas."""
        if self.has_sole_owner:
            self.param_gather_dispatched = True
        else:
            super().start_param_sync(force_sync)

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """See Megatron's; both ways to a reduction lead through it, the last gradient of a part and the end of all passes.
        Collective over the replicas."""
        if self.stream is not None:
            self.stream.wait()
        if self.has_sole_owner:
            self._finish_alone()
        else:
            super().start_grad_sync(force_all_reduce)

    def _finish_alone(self) -> None:
        """Do what Megatron's does beside the collective."""
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        assert self.grad_reduce_handle is None
        settings = self.ddp_config
        if settings.check_for_nan_in_grad or settings.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=settings.check_for_nan_in_grad, check_for_large=settings.check_for_large_grads
            )
        for bucket in self.buckets:
            if bucket.gradient_scaling_factor != 1.0:
                bucket.grad_data *= bucket.gradient_scaling_factor
        self.grad_reduce_handle = Reduction(None) if settings.overlap_grad_reduce else None


class Reduction:
    """A reduction that the current stream can wait for, if it is on another one."""

    def __init__(self, stream: GradientStream | None) -> None:
        self._stream = stream

    def wait(self) -> None:
        """Have the current stream wait."""
        if self._stream is not None:
            self._stream.wait()


def parts_of(wrapped: DistributedDataParallel) -> list[DdpPart]:
    """All parts of a DDP: of what every rank of a stage may hold, then of tables and experts."""
    return [*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups]


def take_over_parts(wrapped: DistributedDataParallel) -> None:
    """Have Megatron's parts be those of this engine: DDP makes them itself, and names no class for them."""
    for part in parts_of(wrapped):
        if not isinstance(part, DdpPart):
            part.__class__ = DdpPart
