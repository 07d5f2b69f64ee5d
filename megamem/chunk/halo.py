"""Tokens before those that a rank holds: what is causal and local reads them across the cuts of a sequence.

Legend: t tokens of a sequence on this rank, b sequences, w tokens of a halo.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Halo(Protocol):
    """Reaches the tokens before each stretch of consecutive tokens that a rank holds."""

    def extended(self, x: Tensor, width: int) -> tuple[Tensor, ...]:
        """The stretches of x [t, b, ...], in order, each behind the `width` tokens before it: [w + length, b, ...] each.

        Zeros stand before the start of a sequence; positions tell them from tokens. Gradients go back to where the
        tokens are.
        """
        ...


class WholeSequences:
    """The halo where nothing is cut: all tokens of a sequence are on this rank."""

    def extended(self, x: Tensor, width: int) -> tuple[Tensor, ...]:
        """See `Halo.extended`."""
        return (torch.cat((x.new_zeros(width, *x.shape[1:]), x)),)


UNCUT = WholeSequences()


def extended_in_one(halo: Halo, x: Tensor, width: int) -> Tensor:
    """[c (w + L), b, ...]: all c stretches of `Halo.extended`, one behind the other, which are equally long."""
    parts = halo.extended(x, width)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shifted(extended: tuple[Tensor, ...], width: int, lag: int) -> Tensor:
    """[t, b, ...]: for every token what stands `lag` tokens before it; lag <= `width` of the halo."""
    parts = [part[width - lag : len(part) - lag] for part in extended]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
