"""Cross entropy of the next token, from hidden states to losses, whose logits exist for a chunk of tokens at a time.

Whole, the logits of T tokens take 4 T V bytes per rank in fp32, and 6 T V in bf16 (their fp32 softmax, and its gradient
in bf16): 25 GB for 32K tokens of a vocabulary of 128K. Here a chunk of n tokens takes its place: 4 n V bytes in fp32, and
in bf16 2 n V with Triton's kernels, which widen in registers, and 6 n V with PyTorch's. Forward keeps two numbers per
token, the largest logit and the sum of exponentials; backward computes the logits of each chunk again, which is one
product of matrices more than the three of the whole.

Tensor-parallel ranks hold a part of the vocabulary each, and a part of the sequence: a chunk is gathered from all of
them, and its gradient goes back to them. All ranks therefore cut alike.

Legend: t tokens of a sequence on this rank, s = t x tensor, b sequences, D model width, V ids on this rank, n tokens of a
chunk over all tensor-parallel ranks, m = n / tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.select import Kernels
from kernels.softmax_sums.op import places_to_read


class ChunkedLoss(nn.Module):
    """The losses of hidden states under an output projection. A module without weights, so that hooks can precede it.

    Attributes:
        chunk_tokens: tokens whose logits may exist at a time, over the tensor-parallel ranks, which all hold their part
            of the vocabulary for each; rounded down to a multiple of them, but to no less.
    """

    def __init__(self, chunk_tokens: int, tensor_group: dist.ProcessGroup, kernels: Kernels) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        self._group, self._kernels = tensor_group, kernels

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Negative log-likelihoods in nats.

        In backward the gradient of `weight`, if it is trained, is the sum over chunks. If the weight has a `main_grad`, as under
        Megatron's DDP, all chunks but the last add theirs to it, in its precision; that of the last reaches the weight
        by autograd, whose hooks therefore see one gradient per backward pass, as of any other use.

        Args:
            hidden: [t, b, D], this rank's part of the sequence.
            weight: [V, D].
            labels: [b, s] int64, of the whole sequence.

        Returns:
            [b, s], fp32 (fp64 of fp64), the same on all tensor-parallel ranks.
        """
        tensor_size, (_, num_sequences, width) = self._group.size(), hidden.shape
        # Tokens in the order in which a gather brings them: rank, place, sequence.
        targets = labels.t().reshape(tensor_size, -1)
        rows = max(1, self.chunk_tokens // tensor_size)
        losses: Tensor = _ChunkedCrossEntropy.apply(
            hidden.reshape(-1, width), weight, targets, rows, self._group, self._kernels
        )
        return losses.view(-1, num_sequences).t().contiguous()


@torch.no_grad()
def judge(
    hidden: Tensor, weight: Tensor, labels: Tensor, asked: Tensor, chunk_tokens: int, tensor_group: dist.ProcessGroup
) -> Tensor:
    """Negative log-likelihood of the labels that are asked for, and whether each is the likeliest id.

    Chunks in which nothing is asked cost nothing. Equal logits are nobody's likeliest, so that a model that knows
    nothing is never right by the order of its ids.

    Args:
        hidden, weight, labels: arguments of `ChunkedLoss.forward`.
        asked: [b, s], not 0 where it is asked.

    Returns:
        [2, b, s], fp32 (fp64 of fp64), the same on all tensor-parallel ranks: negative log-likelihoods in nats, and 1
        where the label is the likeliest id; 0 elsewhere.
    """
    tensor_size, (_, num_sequences, width) = tensor_group.size(), hidden.shape
    targets, wanted = (x.t().reshape(tensor_size, -1) for x in (labels, asked))
    hidden = hidden.reshape(-1, width)
    judged = hidden.new_zeros(2, *targets.shape, dtype=_at_least_fp32(hidden))
    for chunk in _chunks(hidden, max(1, chunk_tokens // tensor_size)):
        # Host sync, of evaluation alone. All ranks skip the same chunks: they know what is asked of each other's tokens.
        if not wanted[:, chunk].any():
            continue
        logits = _gathered(hidden[chunk], tensor_group) @ weight.t()
        logits = logits.to(_at_least_fp32(logits))
        place, elsewhere = places_to_read(_places(targets[:, chunk], weight, tensor_group), len(weight))
        of_target = logits.gather(1, place).masked_fill_(elsewhere, 0.0)
        dist.all_reduce(of_target, group=tensor_group)
        num_as_likely = (logits >= of_target).sum(1)
        dist.all_reduce(num_as_likely, group=tensor_group)
        top = logits.amax(1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=tensor_group)
        total = (logits - top).exp_().sum(1, keepdim=True)
        dist.all_reduce(total, group=tensor_group)
        nats = (total.log() + top - of_target).squeeze(1)
        judged[:, :, chunk] = torch.stack((nats, (num_as_likely == 1).to(nats.dtype))).view(2, tensor_size, -1)
    judged *= wanted != 0
    return judged.view(2, -1, num_sequences).transpose(1, 2).contiguous()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Losses [tensor, t b] of hidden states [t b, D], `rows` of each rank at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: int,
        group: dist.ProcessGroup,
        kernels: Kernels,
    ) -> Tensor:
        top, total, of_target = (hidden.new_empty(targets.shape, dtype=_at_least_fp32(hidden)) for _ in range(3))
        for chunk in _chunks(hidden, rows):
            places = _places(targets[:, chunk], weight, group)
            # Without a name, so that the memory of logits is free for the next chunk's.
            found = kernels.softmax_sums(_gathered(hidden[chunk], group) @ weight.t(), places)
            for whole, part in zip((top, total, of_target), found, strict=True):
                whole[:, chunk] = part.view(len(targets), -1)
        if group.size() > 1:
            own = top.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            sums = torch.stack((total.mul_(own.sub_(top).exp_()), of_target))
            dist.all_reduce(sums, group=group)
            total, of_target = sums.unbind(0)
        ctx.save_for_backward(hidden, weight, targets, top, total)
        ctx.rows, ctx.group, ctx.kernels = rows, group, kernels
        return total.log().sub_(of_target.sub_(top))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        (of_losses,) = gradients
        hidden, weight, targets, top, total = ctx.saved_tensors
        group = ctx.group
        of_hidden = torch.empty_like(hidden)
        of_weight = _WeightGradient(weight) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(hidden, ctx.rows):
            tokens = _gathered(hidden[chunk], group)
            of_logits = ctx.kernels.softmax_gradient(
                tokens @ weight.t(),
                _places(targets[:, chunk], weight, group),
                *(each[:, chunk].reshape(-1) for each in (top, total, of_losses)),
            )
            of_hidden[chunk] = _scattered(of_logits @ weight, group)
            if of_weight is not None:
                of_weight.add(of_logits, tokens, is_last=chunk.stop == len(hidden))
            # Before the next chunk's logits take their place beside it.
            del of_logits
        return of_hidden, None if of_weight is None else of_weight.result, None, None, None, None


class _WeightGradient:
    """The sum of gradients^T tokens over chunks, in fp32 until it is complete.

    Attributes:
        result: gradient that is left for autograd, in the weight's dtype, once the last chunk is in.
    """

    result: Tensor

    def __init__(self, weight: Tensor) -> None:
        self._dtype = weight.dtype
        main: Tensor | None = getattr(weight, "main_grad", None)
        self._leaves_last = main is not None
        self._sum = main if main is not None else torch.zeros_like(weight, dtype=_at_least_fp32(weight))

    def add(self, of_logits: Tensor, tokens: Tensor, *, is_last: bool) -> None:
        """Args: of_logits: [n, V]. tokens: [n, D]. is_last: no other chunk follows."""
        if is_last and self._leaves_last:
            self.result = of_logits.t() @ tokens
            return
        if self._sum.dtype == self._dtype:
            self._sum.addmm_(of_logits.t(), tokens)
        else:
            self._sum += of_logits.t() @ tokens
        if is_last:
            self.result = self._sum.to(self._dtype)


def _at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(hidden: Tensor, rows: int) -> Iterator[slice]:
    num_tokens = len(hidden)
    return (slice(first, min(first + rows, num_tokens)) for first in range(0, num_tokens, rows))


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, D] of every rank's [m, D]."""
    if group.size() == 1:
        return part
    whole = part.new_empty(group.size() * len(part), part.shape[1])
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole


def _scattered(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's [m, D] of the sum over ranks of [n, D]."""
    if group.size() == 1:
        return whole
    part = whole.new_empty(len(whole) // group.size(), whole.shape[1])
    dist.reduce_scatter_tensor(part, whole, group=group)
    return part


def _places(targets: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Indices [n] of targets [tensor, m] in this rank's part of the vocabulary; outside of it for those of others."""
    places = targets.reshape(-1)
    return places - group.rank() * len(weight) if group.rank() else places
