"""Auxiliary losses of a memory layer (UltraMemV2, section 3.6): Tucker-core penalty and key balance.

Both are off by default, as in the paper. The schedule and the reported loss know nothing of them: an identity on the
layer's output adds their gradients in backward.

Their weight: gradients are summed over microbatches and over all ranks that hold tokens, and divided once per step by
the number of targets. Each microbatch's share is therefore injected with weight x T, the tokens that this rank holds of
it. The step's gradient then contains weight x (mean over tokens), whatever the number of microbatches and the layout.
(Training counts every token as a target; where only a share r of them counted, the weight would be larger by 1 / r.)

The balance loss is a product of two statistics, so it depends on which tokens they are taken over. Those are sequences,
a number of them that the configuration names, and never the microbatch: otherwise train.micro_batch_size would choose
among losses. They cannot be the whole batch. The gradient is that of p, weighted by f of all tokens: it goes through
every block below, and the first microbatch's backward pass runs before the last one's tokens have selected anything.

Legend: T = s b tokens of this rank, s places of b sequences; G groups of g = b / G sequences; H heads, N keys per side,
R Tucker rank, C cores, M rows (and columns) kept by stage 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.config.memory import LossWeights

LOSS_NAMES = ("tucker_penalty", "key_balance")
"""The losses by their names in metrics."""


def tucker_penalty(core_sum: Tensor, margin: float) -> Tensor:
    """Eq. 17 without its coefficient: 1 / (R - 1) sum_{i >= 2} max(0, lambda_i - tau)^2, mean over the heads.

    Args:
        core_sum: [..., H, R, R] with R > 1, the cores summed over C, which the first stage approximates by rank 1.
        margin: tau, below which a singular value costs nothing.

    Returns:
        [...], differentiable in the cores through their singular values.
    """
    # Host sync on GPUs: the SVD looks at its convergence.
    excess = (torch.linalg.svdvals(core_sum)[..., 1:] - margin).clamp_min(0)
    return excess.square().mean((-2, -1))


def key_balance(
    scores: Tensor, selected: Tensor, num_groups: int, sequences: int, token_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Eq. 18-20 without their coefficient, sum over sides of N sum_n f_n p_n: 2 if every key is selected equally often.

    p is the mean of Softmax(scores) over tokens and heads. f, without gradient, is a key's share of all selections, so
    that it sums to 1 as in the release; the paper's Count / T sums to H M, which the weight absorbs. The heads share
    one histogram (as released).

    Args:
        scores: [2, T, H, N], what the first stage ranks rows and columns by, <u, S_row> and <v, S_col>. Tokens are in
            the order of [s, b].
        selected: [2, T, H, M], int64 keys that the first stage kept.
        num_groups: G; of each group of consecutive sequences f and p are taken apart, and its loss.
        sequences: g, of one group.
        token_group: ranks that hold the other tokens of these sequences: f counts theirs too. Since the loss is linear
            in p, its mean over the ranks then is that of the whole sequences, and does not depend on how they are split.

    Returns:
        A scalar, the mean over the groups.
    """
    num_keys = scores.shape[-1]
    by_group = selected.unflatten(1, (-1, num_groups, sequences)).transpose(1, 2).flatten(2).flatten(0, 1)
    # In one dimension: in several, PyTorch's deterministic sums ask the host, which a CUDA graph cannot.
    first = torch.arange(0, 2 * num_groups * num_keys, num_keys, device=selected.device)
    places = (by_group + first.unsqueeze(1)).flatten()
    counts = scores.new_zeros(2 * num_groups * num_keys)
    counts.scatter_add_(0, places, counts.new_ones(()).expand(places.shape))
    counts = counts.view(2, num_groups, num_keys)
    if token_group is not None and token_group.size() > 1:
        dist.all_reduce(counts, group=token_group)
    frequency = counts / counts.sum(2, keepdim=True)
    probability = scores.softmax(-1).unflatten(1, (-1, num_groups, sequences)).mean((1, 3, 4))
    return num_keys * (frequency * probability).sum() / num_groups


class AuxiliaryLosses:
    """The auxiliary losses of one layer, and their sums over a step.

    Balance statistics are those of `balance_sequences` consecutive sequences, whole ones: neither the layout changes
    them nor the size of a microbatch, which is a multiple of so many. A loss that is switched off stays 0.

    Attributes:
        sums: [1 + losses] fp64: tokens of this rank since `begin_losses`, and per loss of `LOSS_NAMES` the sum of value
            x tokens.
        penalty: penalty of this step's cores, a scalar.
        penalty_gradient: its gradient in their sum, [H, R, R].
    """

    penalty: Tensor
    penalty_gradient: Tensor

    def __init__(self, weights: LossWeights, token_group: dist.ProcessGroup | None, device: torch.device | str) -> None:
        self.penalty_weight, self.margin = weights.tucker_penalty, weights.tucker_margin
        self.balance_weight, self.balance_sequences = weights.key_balance, weights.balance_sequences
        self.token_group, self._has_penalty = token_group, False
        self.sums = torch.zeros(1 + len(LOSS_NAMES), dtype=torch.float64, device=device)

    def keep_penalty(self, penalty: Tensor, gradient: Tensor) -> None:
        """Keep this step's penalty and its gradient where the last step's are: graphs of a microbatch read them there."""
        if self._has_penalty:
            self.penalty.copy_(penalty)
            self.penalty_gradient.copy_(gradient)
        else:
            self.penalty, self.penalty_gradient, self._has_penalty = penalty.clone(), gradient.clone(), True

    def inject(
        self,
        out: Tensor,
        cores: Tensor | None,
        stage_scores: Callable[[], Tensor],
        stage_ids: Tensor,
        num_sequences: int,
    ) -> Tensor:
        """The layer's output, whose backward adds the gradients of the losses. Call it in training with gradients only.

        Args:
            out: [T, D].
            cores: [C, H, R, R], or None in layers without.
            num_sequences: b, a multiple of `balance_sequences`.
            stage_scores, stage_ids: scores and choice of the first stage (`megamem.layers.retrieval.Retrieved`).
        """
        num_tokens = out.shape[0]
        values = torch.zeros_like(self.sums)
        values[0] = 1.0
        if self.penalty_weight:
            values[1] = self.penalty
            # Linear in the cores, with the penalty's gradient.
            assert cores is not None
            linear = (cores.sum(0) * self.penalty_gradient).sum()
            out = inject(out, linear, self.penalty_weight * num_tokens)
        if self.balance_weight:
            num_groups, left = divmod(num_sequences, self.balance_sequences)
            assert left == 0, f"{num_sequences} sequences, of which {self.balance_sequences} are taken together"
            balance = key_balance(stage_scores(), stage_ids, num_groups, self.balance_sequences, self.token_group)
            values[2] = balance.detach()
            out = inject(out, balance, self.balance_weight * num_tokens)
        self.sums += values * num_tokens
        return out


def begin_losses(layers: Sequence[tuple[AuxiliaryLosses, Tensor | None]]) -> None:
    """Start the sums of layers of one model anew, and take the penalties' gradients from their cores.

    The cores do not change within a step, so neither do the gradients: all layers take one SVD per step.

    Args:
        layers: the losses of each, and its cores [C, H, R, R] (None in layers without).
    """
    for losses, _ in layers:
        losses.sums.zero_()
    penalised = [(losses, cores) for losses, cores in layers if losses.penalty_weight and cores is not None]
    if not penalised:
        return
    wide = torch.promote_types(penalised[0][1].dtype, torch.float32)
    sums = torch.stack([cores.detach().to(wide).sum(0) for _, cores in penalised]).requires_grad_()
    with torch.enable_grad():
        penalties = tucker_penalty(sums, penalised[0][0].margin)
    (gradients,) = torch.autograd.grad(penalties.sum(), sums)
    for (losses, _), penalty, gradient in zip(penalised, penalties.detach(), gradients, strict=True):
        losses.keep_penalty(penalty, gradient)


class _GradientInjection(torch.autograd.Function):
    """The identity on `out`; backward treats weight x loss as a part of the training loss."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.loss_gradient = torch.full_like(loss, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.loss_gradient, None


def inject(out: Tensor, loss: Tensor, weight: float) -> Tensor:
    """`out` itself, whose backward treats weight x loss as a part of the training loss."""
    injected: Tensor = _GradientInjection.apply(out, loss, weight)
    return injected
