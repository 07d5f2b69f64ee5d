"""One optimizer step, and one pass without gradients, through Megatron's pipeline schedules.

Legend: b sequences of a microbatch, s tokens per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from megamem.attention.documents import DOCUMENT_BOUNDS
from megamem.backbone.multi_token import losses_ahead, stacked, tokens_ahead
from megamem.model import MemoryGPTModel
from parallel.context import own_tokens
from parallel.groups import ParallelGroups
from pretrain.engine.auxiliary_losses import auxiliary_means, auxiliary_sums
from pretrain.engine.chunks import Chunk, unwrap
from pretrain.engine.gradient_norms import GradientNorms
from pretrain.engine.microbatch_graph import MicrobatchGraph
from pretrain.engine.nonfinite import NonFinite, find_non_finite
from pretrain.engine.optimizer import MemoryOptimizer
from pretrain.engine.pipeline_messages import WithoutGradients
from pretrain.engine.save_progress import NO_SAVE, SaveProgress
from pretrain.engine.weight_gathering import wait_for

Batch = dict[str, Tensor]
ForwardStep = Callable[[Iterator[Batch], Chunk], tuple[Tensor, Callable[[Tensor], Any]]]
"""A microbatch through a chunk: its output, and a function of it to a loss, its targets and `{"loss": measured}`."""


@dataclass(frozen=True)
class LossSum:
    """Summed negative log-likelihood in nats and the number of targets, over all ranks.

    `by_domain` has those of the domains of held-out documents, where a batch names the domain of each target.
    """

    nats: float
    num_tokens: float
    by_domain: tuple[LossSum, ...] = ()

    @property
    def mean(self) -> float:
        """Nats per target; NaN without any, which is no loss and nothing to compare others with."""
        return self.nats / self.num_tokens if self.num_tokens else math.nan


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Attributes:
        loss: the training loss, without auxiliary losses.
        auxiliary: the unweighted auxiliary losses that are switched on, by name and block: means over the step's
            tokens.
        ahead: losses of predictions of further tokens, in nats per target, by how many beyond the next.
        norms: norms of the gradients.
        stop_requested: any rank was told to stop.
        ranks_saved: ranks that are done with their part of a save in flight.
        ranks_failed_to_save: ranks that could not do it.
        spike: the reason that the step was judged to be one; None: it was not.
        non_finite: places of gradients that are not finite, if the loss or a norm is not.
    """

    loss: LossSum
    auxiliary: dict[str, dict[int, float]]
    norms: GradientNorms
    stop_requested: bool
    ranks_saved: int
    ranks_failed_to_save: int
    ahead: dict[int, float] = field(default_factory=dict)
    spike: str | None = None
    non_finite: tuple[NonFinite, ...] = ()

    @property
    def is_finite(self) -> bool:
        """True if loss and gradients are finite."""
        return self.norms.are_finite and math.isfinite(self.loss.nats)

    @property
    def updated(self) -> bool:
        """True if the update was applied."""
        return self.is_finite and self.spike is None


Judge: TypeAlias = Callable[[float, float], str | None]
"""Reason not to apply an update, by the loss in nats per token and the gradient norm; None: apply it."""


def no_spikes(loss: float, grad_norm: float) -> str | None:
    """Judge no step to be a spike."""
    return None


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
    save_progress: SaveProgress = NO_SAVE,
    judge: Judge = no_spikes,
    graph: MicrobatchGraph | None = None,
    updates_tables: bool = True,
) -> StepResult:
    """Forward and backward over the microbatches, clip, update.

    A loss or a gradient norm that is not finite, or that is judged to be a spike, leaves weights and optimizer state as
    they are. Both are known to all ranks before the update.

    Args:
        optimizer: optimizer whose groups already carry this step's learning rates.
        iterators: a stream of microbatches per chunk; all read the same samples.
        num_microbatches: microbatches per data-parallel rank.
        micro_batch_size: b.
        sequence_length: s.
        stop_requested: this rank was told to stop; one rank is enough for all to stop.
        save_progress: this rank's part of a save in flight, which all will know after the step.
        judge: decides alike on all ranks.
        graph: graph of a microbatch's passes, in the place of Megatron's schedule.
        updates_tables: tables whose gradients are rows are updated, too, by all steps since their last update; else what
            they read waits, and is in no norm.
    """
    optimizer.announce_step(updates_tables=updates_tables)

    def begin() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
            model = unwrap(chunk)
            wait_for(chunk, model.decomposed_weights)
            model.begin_step()
        optimizer.zero_grad()

    begin()
    if graph is not None and graph.holds_this_step:
        (iterator,) = iterators
        losses = graph.run(iterator, num_microbatches, _forward_step, begin)
    else:
        losses = _schedule(chunks, iterators, num_microbatches, micro_batch_size, sequence_length, forward_only=False)
    loss, auxiliary, ahead, flags = _world_loss(
        losses, chunks, groups, (stop_requested, save_progress.done, save_progress.failed)
    )
    optimizer.prepare_grads()
    norms = optimizer.gradient_norms()
    num_stop, num_saved, num_failed = flags
    result = StepResult(loss, auxiliary, norms, num_stop > 0, num_saved, num_failed, ahead)
    if not result.is_finite:
        return replace(result, non_finite=find_non_finite(chunks, groups))
    if spike := judge(loss.mean, norms.main):
        return replace(result, spike=spike)
    optimizer.clip(norms)
    optimizer.step_with_ready_grads()
    return result


@torch.no_grad()
def evaluation_loss(
    chunks: Sequence[Chunk],
    iterators: Sequence[Iterator[Batch]],
    groups: ParallelGroups,
    *,
    num_microbatches: int,
    micro_batch_size: int,
    sequence_length: int,
    num_domains: int = 0,
) -> LossSum:
    """Summed loss over the microbatches, without gradients; see `train_step` for the arguments.

    Args:
        num_domains: batches have `domains` [b, s], numbers below it, and the sum of each is wanted too.
    """
    step = _forward_step if num_domains == 0 else partial(_forward_step, num_domains=num_domains)
    results = forward_passes(chunks, iterators, step, num_microbatches, micro_batch_size, sequence_length)
    sums = torch.zeros(1 + num_domains, 2, dtype=torch.float64, device=groups.device)
    if results:
        sums += torch.stack(results).sum(0).view_as(sums)
    total, *by_domain = (LossSum(*part) for part in world_sums(sums, groups).tolist())
    return replace(total, by_domain=tuple(by_domain))


@torch.no_grad()
def forward_passes(
    chunks: Sequence[Chunk],
    iterators: Sequence[Iterator[Batch]],
    forward_step: ForwardStep,
    num_microbatches: int,
    micro_batch_size: int,
    sequence_length: int,
) -> list[Tensor]:
    """Run `forward_step` without gradients. Returns its measurements of each microbatch on the last stage, elsewhere
    nothing. Collective."""
    for chunk in chunks:
        chunk.eval()
    sizes = (num_microbatches, micro_batch_size, sequence_length)
    results = _schedule(chunks, iterators, *sizes, forward_only=True, forward_step=forward_step)
    for chunk in chunks:
        chunk.train()
    return results


def world_sums(sums: Tensor, groups: ParallelGroups) -> Tensor:
    """Sums over all ranks of measurements on their own tokens; tensor-parallel ranks have measured the same."""
    if dist.get_rank(groups.megatron.tp) != 0:
        sums.zero_()
    dist.all_reduce(sums)
    return sums


def _schedule(
    chunks: Sequence[Chunk],
    iterators: Sequence[Iterator[Batch]],
    num_microbatches: int,
    micro_batch_size: int,
    sequence_length: int,
    *,
    forward_only: bool,
    forward_step: ForwardStep | None = None,
) -> list[Tensor]:
    """Run Megatron's schedule. Returns [loss sum, targets] per microbatch, or the measurements of another forward step,
    on the last stage only."""
    run = get_forward_backward_func()
    first = unwrap(chunks[0])
    messages: dict[str, Any] = {}
    if not forward_only and not first.output_needs_gradient and len(chunks) == 1 and not first.post_process:
        # Without interleaving, gradients that nobody wants are not sent.
        communicator = WithoutGradients(pp_group=first.pg_collection.pp, config=first.config)
        messages = {"p2p_communicator": communicator, "pg_collection": first.pg_collection}
    results: list[dict[str, Tensor]] = run(
        forward_step_func=forward_step or _forward_step,
        data_iterator=list(iterators) if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=num_microbatches,
        seq_length=sequence_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        **messages,
    )
    return [result["loss"] for result in results]


def read_microbatch(iterator: Iterator[Batch], model: MemoryGPTModel) -> tuple[Batch, Tensor | None]:
    """Read a chunk's part of the next microbatch: this rank's tokens, and the bounds of documents if they are separate.

    In training, `labels` has those of a branch that predicts further tokens, too. Empty where the chunk reads no tokens.
    """
    whole = dict(next(iterator)) if model.reads_tokens else {}
    # Bounds of whole sequences, on every context-parallel rank; in host memory.
    bounds = whole.pop(DOCUMENT_BOUNDS, None)
    assert bounds is not None or not model.separate_documents, "nothing says where documents begin"
    ahead = model.model_config.num_branch_blocks if model.training and model.multi_token is not None else 0
    if ahead:
        whole |= tokens_ahead(whole["labels"], whole["loss_mask"], whole["position_ids"], ahead)
    batch = own_tokens(whole, model.cp_group) if whole else {}
    if ahead:
        batch["labels"] = stacked(batch, ahead)
    return batch, bounds if model.separate_documents else None


def _forward_step(
    iterator: Iterator[Batch], chunk: Chunk, *, num_domains: int = 0
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    model = unwrap(chunk)
    batch, bounds = read_microbatch(iterator, model)
    output = chunk(batch.get("tokens"), batch.get("position_ids"), bounds, labels=batch.get("labels"))
    if num_domains:
        return output, partial(_loss_by_domain, batch.get("loss_mask"), batch.get("domains"), num_domains)
    return output, partial(_loss, batch.get("loss_mask"))


def _loss(loss_mask: Tensor | None, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Summed loss and number of targets of this rank's tokens of a microbatch: losses and loss_mask are [b, tokens]."""
    assert loss_mask is not None
    total = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum()
    return total, num_tokens.int(), {"loss": torch.stack([total.detach().double(), num_tokens.double()])}


def _loss_by_domain(
    loss_mask: Tensor | None, domains: Tensor | None, num_domains: int, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """As `_loss`, with its two sums followed by the same two of each domain."""
    total, num_tokens, measured = _loss(loss_mask, losses)
    assert loss_mask is not None
    assert domains is not None
    counted = torch.stack([losses.float() * loss_mask, loss_mask], -1).flatten(0, 1).double()
    by_domain = counted.new_zeros(num_domains, 2).index_add_(0, domains.flatten(), counted)
    return total, num_tokens, {"loss": torch.cat([measured["loss"], by_domain.flatten()])}


def _world_loss(
    losses: Sequence[Tensor], chunks: Sequence[Chunk], groups: ParallelGroups, flags: Sequence[bool]
) -> tuple[LossSum, dict[str, dict[int, float]], dict[int, float], list[int]]:
    """Losses over all ranks, known to every rank, and for each flag the number of ranks that have set it.

    `losses` are [loss sum, targets] per microbatch, on the last stage. The layers of `chunks` have the auxiliary ones, and
    their branch those of further tokens.
    """
    parts = (auxiliary_sums(chunks, groups.device).flatten(), _sums_ahead(chunks, groups.device).flatten())
    first = 2 + len(flags)
    totals = torch.zeros(first + sum(map(len, parts)), dtype=torch.float64, device=groups.device)
    if losses and dist.get_rank(groups.megatron.tp) == 0:
        totals[:2] = torch.stack(list(losses)).sum(0)
    for position, flag in enumerate(flags, start=2):
        totals[position] = float(flag)
    totals[first:] = torch.cat(parts)
    dist.all_reduce(totals)
    # Host sync: the loss is printed and logged at every step.
    nats, num_tokens, *sums = totals.tolist()
    of_flags, sums = sums[: len(flags)], sums[len(flags) :]
    auxiliary, ahead = auxiliary_means(sums[: len(parts[0])], chunks), losses_ahead(sums[len(parts[0]) :])
    return LossSum(nats, num_tokens), auxiliary, ahead, [int(n) for n in of_flags]


def _sums_ahead(chunks: Sequence[Chunk], device: torch.device) -> Tensor:
    """[depth, 2] on every rank, zero where the branch is not; tensor-parallel ranks all count."""
    sums = torch.zeros(unwrap(chunks[0]).model_config.num_branch_blocks, 2, dtype=torch.float64, device=device)
    for model in map(unwrap, chunks):
        if model.multi_token is not None:
            sums += model.multi_token.sums
    return sums
