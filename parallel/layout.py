"""Arithmetic of a layout, without any process group: padding, coefficients of a rank, and tokens that it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache


def padded_size(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


def coefficients_per_rank(num_scores: int, num_ranks: int) -> int:
    """n: coefficients of a row that one rank needs for its columns, see `parallel.exchange.spread_coefficients`."""
    return num_scores // math.gcd(num_scores, num_ranks)


MEETING_RANKS = 16
"""Smallest memory group whose columns meet first: those of one node of eight would only send more."""


def columns_meet_first(row_parts: int, column_parts: int, num_tokens: int) -> bool:
    """Tell whether ranks with other columns of the same rows add up what they have, for equal shares of a rank's tokens,
    before it is sent to the tokens, see `parallel.exchange`."""
    is_large = row_parts * column_parts >= MEETING_RANKS
    return is_large and row_parts > 1 and column_parts > 1 and num_tokens % column_parts == 0


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of a sequence on a rank: places `start` to `stop` - 1, held from `offset` on."""

    start: int
    stop: int
    offset: int


@lru_cache(maxsize=4096)
def stretches(rank: int, num_tokens: int, *, tensor: int, context: int) -> tuple[Stretch, ...]:
    """The stretches of a rank's `num_tokens` tokens, in the order in which it holds them."""
    context_rank, tensor_rank = divmod(rank, tensor)
    first, of_context = tensor_rank * num_tokens, tensor * num_tokens
    if context == 1:
        return (Stretch(first, first + num_tokens, 0),)
    length = of_context // 2
    found = []
    for slice_start, held in ((context_rank * length, 0), ((2 * context - 1 - context_rank) * length, length)):
        low, high = max(first, held), min(first + num_tokens, held + length)
        if low < high:
            found.append(Stretch(slice_start + low - held, slice_start + high - held, low - first))
    return tuple(found)


@lru_cache(maxsize=4096)
def halo_requests(
    rank: int, num_tokens: int, width: int, *, tensor: int, context: int
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """The tokens that a rank asks for: for each of its stretches, of each of the `width` tokens before it, the rank that
    holds it, where that holds it, and its place in the halo. Tokens before the sequence are left out."""
    size, found = tensor * context, []
    for stretch in stretches(rank, num_tokens, tensor=tensor, context=context):
        start = stretch.start - width
        asked = []
        for place in range(max(0, start), stretch.start):
            owner = _owner(place, num_tokens, tensor, context)
            held = next(
                each.offset + place - each.start
                for each in stretches(owner, num_tokens, tensor=tensor, context=context)
                if each.start <= place < each.stop
            )
            asked.append((owner, held, place - start))
        found.append(tuple(asked))
    assert all(owner < size for asked in found for owner, _, _ in asked)
    return tuple(found)


def _owner(place: int, num_tokens: int, tensor: int, context: int) -> int:
    """The rank that holds a place of the sequence."""
    if context == 1:
        return place // num_tokens
    of_context = tensor * num_tokens
    length = of_context // 2
    number, within = divmod(place, length)
    context_rank = number if number < context else 2 * context - 1 - number
    held = within if number < context else length + within
    return context_rank * tensor + held // num_tokens


def halo_tokens_sent(rank: int, num_tokens: int, width: int, *, tensor: int, context: int) -> int:
    """Tokens of each sequence that a rank sends to others for their halos."""
    return sum(
        owner == rank
        for receiver in range(tensor * context)
        if receiver != rank
        for asked in halo_requests(receiver, num_tokens, width, tensor=tensor, context=context)
        for owner, _, _ in asked
    )


def halo_tokens_returned(rank: int, num_tokens: int, width: int, *, tensor: int, context: int) -> int:
    """Tokens of each sequence whose gradients a rank sends back to others: those that it has asked for."""
    requests = halo_requests(rank, num_tokens, width, tensor=tensor, context=context)
    return sum(owner != rank for asked in requests for owner, _, _ in asked)
