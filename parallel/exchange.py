"""Exchanges between the ranks of a memory group in one lookup: five collectives forward, four backward, or one more.

Every rank owns T tokens and W / G columns of a table. A lookup brings what belongs to the tokens to the ranks that own
the columns, and back. No shape depends on data, and nothing waits for a device. Wherever contributions of several ranks
meet, they are sent as they are and summed at their receiver in the order of the ranks, in at least fp32: the bytes of a
reduce-scatter, with rounding that depends on no algorithm of the communication library.

With parts of rows a row's columns lie on few ranks, mostly in one node. These add up what they have of a product, each
for an equal share of the tokens, and send one sum: 1 / (G / R) of the bytes between nodes. Others have zeros of that row,
so the bits are those of a sum at the receiver.

Legend: G ranks of the group, R parts of rows, T tokens of this rank, S tokens of all of them, J rows read per token, C
scores per row, n coefficients per row and rank, B bins (sums per token), W columns on all ranks, w = W R / G on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.common.tables import row_dtype
from parallel.layout import coefficients_per_rank, columns_meet_first


@dataclass(frozen=True)
class Exchange:
    """One lookup's group of ranks, and how many tokens each of them has.

    Attributes:
        group: the memory group.
        counts: tokens by rank, known to all of them without asking.
        row_parts: R; ranks r G / R to (r + 1) G / R - 1 have columns of the same rows.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...]
    row_parts: int = 1

    @property
    def size(self) -> int:
        """G."""
        return len(self.counts)

    @property
    def column_parts(self) -> int:
        """G / R."""
        return self.size // self.row_parts

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.counts[self.group.rank()]

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, in the order of the ranks: from [T, ...] to [S, ...]."""
        x = x.contiguous()
        # Equal in training. The collective wants them so.
        if len(set(self.counts)) == 1:
            out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
            dist.all_gather_into_tensor(out, x, group=self.group)
            return out
        return self._all_to_all(x.repeat(self.size, *(1,) * (x.dim() - 1)), [x.shape[0]] * self.size, self.counts)

    def to_columns(self, x: Tensor) -> Tensor:
        """Send tensors to the ranks whose columns they are for: from [G, T, ...] to [S, ...]."""
        return self._all_to_all(x.flatten(0, 1), [self.num_tokens] * self.size, self.counts)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Send the results of each rank's columns to the ranks of the tokens: from [S, ...] to [G, T, ...]."""
        received = self._all_to_all(x, self.counts, [self.num_tokens] * self.size)
        return received.view(self.size, self.num_tokens, *x.shape[1:])

    @property
    def columns_meet(self) -> bool:
        """True if ranks with other columns of the same rows add up before they send."""
        even = len(set(self.counts)) == 1
        return even and columns_meet_first(self.row_parts, self.column_parts, self.num_tokens)

    def to_columns_of_rows(self, x: Tensor) -> Tensor:
        """Send each rank with other columns of the same rows an equal share of every rank's tokens: from [S, ...] to
        [G / R, G, T / (G / R), ...]."""
        parts, first = self.column_parts, self.group.rank() // self.column_parts * self.column_parts
        shares = x.unflatten(0, (self.size, parts, -1)).transpose(0, 1)
        counts = [x.shape[0] // parts if first <= rank < first + parts else 0 for rank in range(self.size)]
        return self._all_to_all(shares.flatten(0, 2), counts, counts).view(shares.shape)

    def shares_to_tokens(self, x: Tensor) -> Tensor:
        """Send what is added up to the ranks of the tokens: from [G, T / (G / R), ...] to [R, T, ...]."""
        counts = [x.shape[1]] * self.size
        received = self._all_to_all(x.flatten(0, 1), counts, counts)
        return received.view(self.row_parts, self.num_tokens, *x.shape[2:])

    def _all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        out = x.new_empty(sum(receive_counts), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(receive_counts), list(send_counts), group=self.group)
        return out


def gather_ids(
    rows: Tensor, bins: Tensor | None, num_rows: int, num_bins: int, exchange: Exchange
) -> tuple[Tensor, Tensor | None]:
    """Rows that all ranks read, and their bins if there are any: from [T, J] to [S, J].

    They are sent, kept and read by kernels in 32 bits, a bin in one number with its row; in 64 where these do not do.
    """
    dtype = row_dtype(num_rows * num_bins)
    if bins is None:
        return exchange.gather(rows.to(dtype)), None
    both = exchange.gather(torch.add(rows.to(dtype), bins.to(dtype), alpha=num_rows))
    return both % num_rows, both // num_rows


def linear(x: Tensor, apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    """`apply(x)`, a linear function of x, with `adjoint` from the output's gradient to that of x."""
    out: Tensor = _Linear.apply(x, apply, adjoint)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.adjoint = adjoint
        return apply(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return ctx.adjoint(grads[0]), None, None


def split_columns(x: Tensor, exchange: Exchange) -> Tensor:
    """Hand the columns of vectors to the ranks that own them: from [T, W] to [S, w]."""
    return linear(x, partial(_split, exchange, 1), partial(_join, exchange, 1))


def join_columns(x: Tensor, exchange: Exchange, num_bins: int) -> Tensor:
    """Hand columns back to the ranks of the tokens, for B bins at once: from [S, B w] to [T, B W]."""
    return linear(x, partial(_join, exchange, num_bins), partial(_split, exchange, num_bins))


def sum_over_ranks(x: Tensor, exchange: Exchange) -> Tensor:
    """Sum over the ranks what each has for all tokens, for this rank's tokens: from [S, J] to [T, J]."""

    def summed(of_all: Tensor) -> Tensor:
        if not exchange.columns_meet:
            return sum_in_order(exchange.to_tokens(of_all), 0)
        return sum_in_order(exchange.shares_to_tokens(sum_in_order(exchange.to_columns_of_rows(of_all), 0)), 0)

    return linear(x, summed, exchange.gather)


def spread_coefficients(coef: Tensor, exchange: Exchange) -> Tensor:
    """Hand each rank the coefficients of its own columns, and no others: from [T, J, C] to [S, J, n].

    Score c weights the c-th of C equal shares of the columns, and rank r owns the r-th of G. Each of lcm(C, G) equal
    slices has one score and one rank: rank r gets n = lcm(C, G) / G = C / gcd(C, G) coefficients per row, those of
    slices r n to r n + n - 1. A rank within one share gets one, and a rank whose columns straddle shares one per slice.

    With parts of rows, G / R stands for G, and every part wants the same: all coefficients go to all ranks, by a gather
    that crosses between nodes once. An entry's gradient comes from the part that has its row, and is zero from others.
    """
    num_scores = coef.shape[2]
    num_own = coefficients_per_rank(num_scores, exchange.column_parts)
    per_score = exchange.column_parts * num_own // num_scores

    def spread(coef: Tensor) -> Tensor:
        if exchange.row_parts == 1:
            return exchange.to_columns(by_column(coef).contiguous())
        # Its own slices of what all have: those of all ranks would take G / R times as many bytes.
        first = exchange.group.rank() % exchange.column_parts * num_own
        of_all = exchange.gather(coef)
        return torch.stack([of_all[..., index // per_score] for index in range(first, first + num_own)], -1)

    def by_column(coef: Tensor) -> Tensor:
        of_slices = coef.unsqueeze(3).expand(-1, -1, -1, per_score)
        return of_slices.reshape(*coef.shape[:2], exchange.column_parts, num_own).permute(2, 0, 1, 3)

    def by_score(of_columns: Tensor) -> Tensor:
        of_slices = of_columns.movedim(0, -2)
        return sum_in_order(of_slices.reshape(*of_slices.shape[:-2], num_scores, per_score), -1)

    def collect(grad: Tensor) -> Tensor:
        if not exchange.columns_meet:
            return by_score(_sum_of_row_parts(exchange, exchange.to_tokens(grad)))
        return sum_in_order(exchange.shares_to_tokens(by_score(exchange.to_columns_of_rows(grad))), 0)

    return linear(coef, spread, collect)


def _split(exchange: Exchange, num_bins: int, x: Tensor) -> Tensor:
    by_column = x.unflatten(1, (num_bins, exchange.column_parts, -1)).permute(2, 0, 1, 3).flatten(2)
    return exchange.to_columns(by_column.repeat(exchange.row_parts, 1, 1))


def _join(exchange: Exchange, num_bins: int, x: Tensor) -> Tensor:
    by_column = _sum_of_row_parts(exchange, exchange.to_tokens(x)).unflatten(2, (num_bins, -1))
    return by_column.permute(1, 2, 0, 3).flatten(1)


def _sum_of_row_parts(exchange: Exchange, by_rank: Tensor) -> Tensor:
    """Sum over the parts of the rows, from [G, ...] to [G / R, ...]."""
    if exchange.row_parts == 1:
        return by_rank
    return sum_in_order(by_rank.unflatten(0, (exchange.row_parts, -1)), 0)


def sum_in_order(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim`, in at least fp32, rounded once to the dtype of `x`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.sum(dim, dtype=wide).to(x.dtype)
