"""What the ranks of a memory group send each other in one lookup: five collectives forward, four backward.

Every rank owns T tokens and W / G columns of a table. A lookup brings what belongs to the tokens to the ranks that own
the columns, and back. No shape depends on data, and nothing waits for a device. Wherever contributions of several ranks
meet, they are sent as they are and summed at their receiver in the order of the ranks, in at least fp32: the bytes of a
reduce-scatter, with rounding that depends on no algorithm of the communication library.

Legend: G ranks of the group, T tokens of this rank, S tokens of all of them, J rows read per token, C scores per row,
n coefficients per row and rank, B bins (sums per token), W columns on all ranks, w = W / G on one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Exchange:
    """One lookup's group of ranks, and how many tokens each of them has.

    Attributes:
        group: the memory group.
        counts: tokens by rank, known to all of them without asking.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """G."""
        return len(self.counts)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.counts[self.group.rank()]

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many tokens, as they have in training."""
        return len(set(self.counts)) == 1

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, in the order of the ranks: from [T, ...] to [S, ...]."""
        x = x.contiguous()
        if self.is_even:
            out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
            dist.all_gather_into_tensor(out, x, group=self.group)
            return out
        # The collective above wants equal sizes.
        every = [x.shape[0]] * self.size
        return self._all_to_all(x.repeat(self.size, *(1,) * (x.dim() - 1)), every, list(self.counts))

    def gather_bytes(self, packed: Tensor, sizes: list[int]) -> Tensor:
        """The byte strings of all ranks, one after the other, of which `sizes` tells the lengths."""
        if self.is_even:
            return self.gather(packed)
        return self._all_to_all(packed.repeat(self.size), [packed.shape[0]] * self.size, sizes)

    def to_columns(self, x: Tensor) -> Tensor:
        """What is addressed to the columns of each rank, delivered: from [G, T, ...] to [S, ...]."""
        return self._all_to_all(x.flatten(0, 1), [self.num_tokens] * self.size, list(self.counts))

    def to_tokens(self, x: Tensor) -> Tensor:
        """What the columns of each rank have for the tokens, delivered to these: from [S, ...] to [G, T, ...]."""
        received = self._all_to_all(x, list(self.counts), [self.num_tokens] * self.size)
        return received.view(self.size, self.num_tokens, *x.shape[1:])

    def _all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        out = x.new_empty(sum(receive_counts), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive_counts, send_counts, group=self.group)
        return out


def split_columns(x: Tensor, exchange: Exchange, num_bins: int = 1) -> Tensor:
    """Hand the columns of vectors to the ranks that own them: from [T, B W] to [S, B w].

    Args:
        x: B bins of W columns for each of this rank's tokens.
        exchange: the group.
        num_bins: B.
    """
    out: Tensor = _SplitColumns.apply(x, exchange, num_bins)
    return out


def join_columns(x: Tensor, exchange: Exchange, num_bins: int = 1) -> Tensor:
    """The inverse of `split_columns`, columns back to the ranks of the tokens: from [S, B w] to [T, B W]."""
    out: Tensor = _JoinColumns.apply(x, exchange, num_bins)
    return out


def sum_over_ranks(x: Tensor, exchange: Exchange) -> Tensor:
    """Sum over the ranks what each has for all tokens, for this rank's tokens: from [S, J] to [T, J]."""
    out: Tensor = _SumOverRanks.apply(x, exchange)
    return out


def spread_coefficients(coef: Tensor, exchange: Exchange) -> Tensor:
    """Hand each rank the coefficients of its own columns, and no others: from [T, J, C] to [S, J, n].

    Score c weights the c-th of C equal shares of the columns, and rank r owns the r-th of G. Of lcm(C, G) equal slices,
    each has one score and one rank: rank r gets n = lcm(C, G) / G = C / gcd(C, G) coefficients per row, those of slices
    r n to r n + n - 1. A rank inside of one share gets one, and a rank whose columns straddle shares one for each slice.
    """
    out: Tensor = _SpreadCoefficients.apply(coef, exchange)
    return out


def coefficients_per_rank(num_scores: int, num_ranks: int) -> int:
    """n: coefficients of a row that one rank needs for its columns, see `spread_coefficients`."""
    return num_scores // math.gcd(num_scores, num_ranks)


def _split(x: Tensor, exchange: Exchange, num_bins: int) -> Tensor:
    width = x.shape[1] // (num_bins * exchange.size)
    by_rank = x.reshape(x.shape[0], num_bins, exchange.size, width).permute(2, 0, 1, 3)
    return exchange.to_columns(by_rank.flatten(2))


def _join(x: Tensor, exchange: Exchange, num_bins: int) -> Tensor:
    by_rank = exchange.to_tokens(x).view(exchange.size, exchange.num_tokens, num_bins, x.shape[1] // num_bins)
    return by_rank.permute(1, 2, 0, 3).flatten(1)


class _SplitColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, num_bins: int) -> Tensor:
        ctx.exchange, ctx.num_bins = exchange, num_bins
        return _split(x, exchange, num_bins)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _join(grads[0], ctx.exchange, ctx.num_bins), None, None


class _JoinColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, num_bins: int) -> Tensor:
        ctx.exchange, ctx.num_bins = exchange, num_bins
        return _join(x, exchange, num_bins)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _split(grads[0], ctx.exchange, ctx.num_bins), None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return sum_in_order(exchange.to_tokens(x), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return ctx.exchange.gather(grads[0]), None


class _SpreadCoefficients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coef: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.num_scores = exchange, coef.shape[2]
        num_tokens, num_rows_read, num_scores = coef.shape
        num_own = coefficients_per_rank(num_scores, exchange.size)
        per_score = exchange.size * num_own // num_scores
        of_slices = coef.unsqueeze(3).expand(-1, -1, -1, per_score)
        by_rank = of_slices.reshape(num_tokens, num_rows_read, exchange.size, num_own).permute(2, 0, 1, 3)
        return exchange.to_columns(by_rank.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        of_slices = ctx.exchange.to_tokens(grads[0]).permute(1, 2, 0, 3)
        per_score = of_slices.shape[2] * of_slices.shape[3] // ctx.num_scores
        return sum_in_order(of_slices.reshape(*of_slices.shape[:2], ctx.num_scores, per_score), 3), None


def sum_in_order(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim`, in at least fp32, rounded once to the dtype of `x`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.sum(dim, dtype=wide).to(x.dtype)
