"""Tables whose gradients are dense and in bf16 (`optimizer.table_gradient_dtype: bf16`).

Megatron's DDP has one dtype of gradients for all weights of a dtype. So these tables have a buffer of their own beside its
buffers, which it zeroes, reduces, scales and gathers as those. What bf16 would lose is kept so:

- A lookup's sums are added to a row in fp32 and rounded stochastically, so that their mean over steps is exact.
- Replicas send bf16, and add up in fp32 in the order of their ranks: a sum is rounded to nearest, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from kernels.common.rounding import LEVELS, Rounding
from megamem.banks.hashing import key_of
from pretrain.engine.parts import DdpPart, Reduction

# Elements that are in fp32, or on their way to other replicas, at a time.
_WINDOW_ELEMENTS, _WINDOW_ELEMENTS_ON_CPU = 1 << 25, 1 << 18


def windows(gradient: Tensor) -> Iterator[Tensor]:
    """Parts of the last dimension of a bf16 gradient, so large that few are launched, and small beside it."""
    size = _WINDOW_ELEMENTS if gradient.is_cuda else _WINDOW_ELEMENTS_ON_CPU
    yield from gradient.split(max(1, size * gradient.shape[-1] // max(1, gradient.numel())), dim=-1)


class TableRoundings:
    """Roundings of a table's gradient: a function of the table, the update, the replica and the lookup's number.

    Attributes:
        num_updates: updates that the table has seen.
    """

    def __init__(self, seed: int, name: str, first: tuple[int, int], owner: Sequence[int]) -> None:
        """
        Args:
            name: the table's, in checkpoints.
            first: row and column of this rank's part in the whole table.
            owner: numbers of the gradient among those that are added up to the table's.
        """
        self.num_updates = 0
        self._seed, self._name, self._first, self._owner = seed, name, first, tuple(map(str, owner))
        self._key, self._count = 0, 0

    def begin_step(self) -> None:
        """Count lookups anew."""
        self._count = 0

    def next(self) -> Rounding:
        """See `kernels.common.tables.Roundings`."""
        if not self._count:
            self._key = key_of(self._seed, "gradient", self._name, str(self.num_updates), *self._owner)
        key = (self._key + LEVELS * self._count) % 2**63
        self._count += 1
        return Rounding(key, *self._first)


class _Buffer(_ParamAndGradBuffer):
    """Megatron's buffer with gradients in bf16.

    Attributes:
        param_data: the weights. They move there before Megatron makes room for gradients, so that weights, their copy and
            gradients are never there together, which is more than a step takes.
    """

    @property
    def param_data(self) -> Tensor | None:
        return self._param_data

    @param_data.setter
    def param_data(self, data: Tensor | None) -> None:
        self._param_data = data
        if data is not None:
            for parameter, (start, end, _) in self.param_index_map.items():
                own = data[start:end].view(parameter.shape)
                parameter.data = own.copy_(parameter.data)

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Scale in fp32: a factor in bf16 would change the size of all gradients alike."""
        for part in windows(self.grad_data):
            part.copy_(part.float().mul_(scaling_factor))


class Bf16Part(DdpPart):
    """A part of the tables whose gradients are reduced together, on the stream that adds them up."""

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """See Megatron's. Collective over the replicas."""
        assert not force_all_reduce
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        assert self.grad_reduce_handle is None
        if self.stream is None:
            self._reduce()
        else:
            self.stream.run(self._reduce)
        self.grad_reduce_handle = Reduction(self.stream)
        if not self.ddp_config.overlap_grad_reduce:
            self.grad_reduce_handle.wait()
            self.grad_reduce_handle = None

    def _reduce(self) -> None:
        for bucket in self.buckets:
            reduce_scatter(bucket.grad_data, self.intra_distributed_optimizer_instance_group)


def reduce_scatter(gradient: Tensor, replicas: dist.ProcessGroup) -> None:
    """Add up a bf16 gradient over its replicas, each of which gets the sums of its equal share of it, in place.

    As many bytes are sent as in a reduce-scatter, which would round partial sums to bf16. Collective.
    """
    if replicas.size() == 1:
        return
    by_owner = gradient.view(replicas.size(), -1)
    for part in windows(by_owner):
        sent = part.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=replicas)
        sums = received[0].float()
        for of_replica in received[1:]:
            sums += of_replica
        part[replicas.rank()].copy_(sums)


@torch.no_grad()
def add_tables(wrapped: DistributedDataParallel, tables: Sequence[nn.Parameter]) -> None:
    """Give tables that DDP does not know of a buffer beside its own, with gradients in bf16."""
    if not tables:
        return
    settings, replicas = wrapped.ddp_config, wrapped.intra_expt_dp_group
    groups = ProcessGroupCollection()
    groups.tp, groups.dp_cp = wrapped.tp_group, wrapped.dp_cp_group
    names = {parameter: name for name, parameter in wrapped.module.named_parameters()}
    numbers = list(range(len(tables)))
    parameters: list[Any] = list(tables)
    options: dict[str, Any] = {}
    if hasattr(DistributedOptimizer, "_compute_per_buffer_param_layout"):
        # 0.19.2: the optimizer says where parameters lie, and without that they would have no equal shares.
        parameters = [(table, names[table]) for table in tables]
        options["param_layout"] = DistributedOptimizer._compute_per_buffer_param_layout(
            list(tables), wrapped.bucket_size, replicas.size(), settings, numbers
        )
    buffer = _Buffer(
        settings,
        tables[0].dtype,
        torch.bfloat16,
        parameters,
        replicas,
        wrapped.bucket_size,
        names,
        1.0,
        numbers,
        settings.nccl_ub,
        groups,
        **options,
    )
    parts = [Bf16Part([bucket], settings, replicas, replicas.size()) for bucket in buffer.buckets]
    if settings.overlap_param_gather:
        # Forward needs the last part first, and experts behind all tables.
        for following, part in pairwise([*wrapped.expert_parallel_bucket_groups[-1:], *parts]):
            part.next_param_gather_bucket_group = following
    wrapped.expert_parallel_buffers.append(buffer)
    wrapped.expert_parallel_bucket_groups.extend(parts)
    for part in parts:
        wrapped.param_to_bucket_group.update(dict.fromkeys(part.params, part))
    for table in tables:
        table.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        wrapped.params_with_grad.append(table)
        _call_when_added(wrapped, table)


def _call_when_added(wrapped: DistributedDataParallel, table: nn.Parameter) -> None:
    """Have DDP know when autograd has been through all lookups of a table, as it does for its own parameters."""
    with torch.enable_grad():
        accumulation: Any = table.expand_as(table).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulation.register_hook(wrapped._make_backward_post_hook(table))
    # Autograd holds it weakly.
    wrapped.grad_accs.append(accumulation)
