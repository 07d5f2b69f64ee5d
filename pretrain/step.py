"""One optimizer step, and one pass without gradients, through Megatron's pipeline schedules.

Legend: b sequences of a microbatch, s tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from parallel.context import own_tokens
from parallel.groups import ParallelGroups
from pretrain.auxiliary_losses import auxiliary_means, auxiliary_sums
from pretrain.build import Chunk, unwrap
from pretrain.checkpoint.votes import NO_VOTES, SaveVotes
from pretrain.optimizer import GradientNorms, MemoryOptimizer
from pretrain.weight_gathering import wait_for

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class LossSum:
    """Summed negative log-likelihood in nats and the number of targets, over all ranks."""

    nats: float
    num_tokens: float

    @property
    def mean(self) -> float:
        """Nats per target."""
        return self.nats / max(1.0, self.num_tokens)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        loss: the training loss, without auxiliary losses.
        auxiliary: the unweighted auxiliary losses that are switched on, by name and block: means over the step's
            tokens.
        norms: of the gradients. Weights were updated if they are finite.
        stop_requested: whether any rank was told to stop.
        ranks_saved: how many ranks are done with their part of a save in flight.
        ranks_failed_to_save: how many could not do it.
    """

    loss: LossSum
    auxiliary: dict[str, dict[int, float]]
    norms: GradientNorms
    stop_requested: bool
    ranks_saved: int = 0
    ranks_failed_to_save: int = 0


def train_step(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MemoryOptimizer,
    iterators: Sequence[Iterator[Batch]],
    groups: ParallelGroups,
    *,
    num_microbatches: int,
    micro_batch_size: int,
    sequence_length: int,
    stop_requested: bool = False,
    save_votes: SaveVotes = NO_VOTES,
) -> StepResult:
    """Forward and backward over the microbatches, clip, update.

    A non-finite gradient norm leaves weights and optimizer state as they are.

    Args:
        optimizer: whose groups already carry this step's learning rates.
        iterators: a stream of microbatches per chunk; all read the same samples.
        num_microbatches: per data-parallel rank.
        micro_batch_size: b.
        sequence_length: s.
        stop_requested: this rank was told to stop; one rank is enough for all to stop.
        save_votes: what this rank says of a save in flight, which all will know after the step.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
        model = unwrap(chunk)
        wait_for(chunk, model.decomposed_weights)
        model.begin_step()
    optimizer.zero_grad()
    losses = _schedule(chunks, iterators, num_microbatches, micro_batch_size, sequence_length, forward_only=False)
    norms = _update(optimizer)
    loss, auxiliary, flags = _world_loss(losses, chunks, groups, (stop_requested, save_votes.done, save_votes.failed))
    num_stop, num_saved, num_failed = flags
    return StepResult(loss, auxiliary, norms, num_stop > 0, num_saved, num_failed)


@torch.no_grad()
def evaluation_loss(
    chunks: Sequence[Chunk],
    iterators: Sequence[Iterator[Batch]],
    groups: ParallelGroups,
    *,
    num_microbatches: int,
    micro_batch_size: int,
    sequence_length: int,
) -> LossSum:
    """Summed loss over the microbatches, without gradients; see `train_step` for the arguments."""
    for chunk in chunks:
        chunk.eval()
    losses = _schedule(chunks, iterators, num_microbatches, micro_batch_size, sequence_length, forward_only=True)
    for chunk in chunks:
        chunk.train()
    return _world_loss(losses, (), groups, ())[0]


def _schedule(
    chunks: Sequence[Chunk],
    iterators: Sequence[Iterator[Batch]],
    num_microbatches: int,
    micro_batch_size: int,
    sequence_length: int,
    *,
    forward_only: bool,
) -> list[Tensor]:
    """Run Megatron's schedule; the result is [loss sum, targets] per microbatch, on the last stage only."""
    run = get_forward_backward_func()
    results: list[dict[str, Tensor]] = run(
        forward_step_func=_forward_step,
        data_iterator=list(iterators) if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=num_microbatches,
        seq_length=sequence_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )
    return [result["loss"] for result in results]


def _forward_step(iterator: Iterator[Batch], chunk: Chunk) -> tuple[Tensor, Callable[[Tensor], Any]]:
    model = unwrap(chunk)
    batch = own_tokens(next(iterator), model.cp_group) if model.reads_tokens else {}
    output = chunk(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
    return output, partial(_loss, batch.get("loss_mask"))


def _loss(loss_mask: Tensor | None, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Summed loss and number of targets of this rank's tokens of a microbatch: losses and loss_mask are [b, tokens]."""
    assert loss_mask is not None
    total = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum()
    return total, num_tokens.int(), {"loss": torch.stack([total.detach().double(), num_tokens.double()])}


def _update(optimizer: MemoryOptimizer) -> GradientNorms:
    """Clip by norm and step, or skip the step if a norm is not finite."""
    optimizer.prepare_grads()
    norms = optimizer.gradient_norms()
    if norms.are_finite:
        optimizer.clip(norms)
        optimizer.step_with_ready_grads()
    return norms


def _world_loss(
    losses: Sequence[Tensor], chunks: Sequence[Chunk], groups: ParallelGroups, flags: Sequence[bool]
) -> tuple[LossSum, dict[str, dict[int, float]], list[int]]:
    """Losses over all ranks, known to every rank, and of each flag, how many ranks have set it.

    `losses` are [loss sum, targets] per microbatch, on the last stage. The layers of `chunks` have the auxiliary ones.
    """
    auxiliary = auxiliary_sums(chunks, groups.device)
    first = 2 + len(flags)
    totals = torch.zeros(first + auxiliary.numel(), dtype=torch.float64, device=groups.device)
    if losses and dist.get_rank(groups.megatron.tp) == 0:
        totals[:2] = torch.stack(list(losses)).sum(0)
    for position, flag in enumerate(flags, start=2):
        totals[position] = float(flag)
    totals[first:] = auxiliary.flatten()
    dist.all_reduce(totals)
    # Host sync: the loss is printed and logged at every step.
    nats, num_tokens, *sums = totals.tolist()
    return LossSum(nats, num_tokens), auxiliary_means(sums[len(flags) :], chunks), [int(n) for n in sums[: len(flags)]]
