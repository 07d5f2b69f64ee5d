"""Hashes of the n-grams that end at a token, which stand for its id where a memory's rows are addressed.

Published rules: "sum" in github.com/karpathy/nanochat/pull/854 and github.com/KellerJordan/modded-nanogpt/pull/366, "xor"
in pulls 201 and 299 of the latter; "polynomial" in LongCat (arXiv 2601.21204) and vLLM's code of it.

Legend: N highest order, K heads per order, A = (N - 1) K addresses of a token, c_j the id j tokens before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le
from pydantic import NonNegativeInt, PositiveInt

from megamem.addresses.primes import largest_prime
from megamem.config.base import Advice, Config, EffectiveWhen

MISSING_ID = 0
"""Id that stands for what is before the start of a sequence, in all published codes."""
_PRIMES = (1000003, 998244353, 911382323, 805306457)
_STRIDES = (2654435761, 40503, 40503, 40503)
"""By distance, numbers of the multipliers of "sum"."""
_XOR = {2: (36313, 27191), 3: (36313, 27191, 51647)}
"""By order, multipliers of "xor", the current id's first. The last one is ours: no source shows those of trigrams' rows."""
_SIGNS = {2: (48271, 30011), 3: (58699, 39779, 26801)}
"""By order, multipliers of hashed signs, the current id's first (modded-nanogpt, pull 360)."""
_HIGHEST_ORDER = {"sum": 4, "xor": 3, "polynomial": 5}
"""By rules, tokens of the longest n-gram that a source gives multipliers for; of polynomials, that was published."""


@dataclass(frozen=True)
class Hashes:
    """All addresses of a token: offset_a + (c_0 m_a0 op c_1 m_a1 op ...) mod p_a.

    Attributes:
        operation: op.
        orders: [A], tokens of each address's n-gram.
        multipliers: [A][N], 0 behind an n-gram's own tokens.
        moduli: [A], p_a.
        offsets: [A], least number of each address.
        missing: number behind the offset of n-grams that the start of a sequence cuts; None: ids that are not there are 0.
    """

    operation: Literal["sum", "xor"]
    orders: tuple[int, ...]
    multipliers: tuple[tuple[int, ...], ...]
    moduli: tuple[int, ...]
    offsets: tuple[int, ...]
    missing: int | None


@dataclass(frozen=True)
class NgramAddressConfig(Config):
    """Addresses of a token: hashes of the n-grams that end at it."""

    rules: Literal["sum", "xor", "polynomial"] = "sum"
    """Rules by which ids are hashed. sum: (sum_j c_j m_j) mod p with the largest prime p up to num_rows; all heads share one
    range of rows, and ids before a sequence's start are 0. xor: (xor_j c_j m_j) mod (num_rows - 1); every order has a range
    of rows, whose last one is that of n-grams which a sequence's start cuts. polynomial: (sum_j c_j base^j) mod (num_rows + 2 q + 1)
    for the q-th hash of all, which has a range of rows of its own; ids that are not there are 0, as are those up to the last
    boundary_id before a token."""
    max_order: Annotated[int, Ge(2), Le(5), Advice("n-grams have 2 to 5 tokens")] = 2
    """N: tokens of the longest n-gram; there are those of every order from 2 on."""
    heads_per_order: Annotated[
        PositiveInt, EffectiveWhen(lambda c: c.rules != "xor", "rules are sum or polynomial")
    ] = 1
    """K: hashes of each order."""
    num_rows: Annotated[int, Ge(3), Advice("as many n-grams share a row as there are of them per row")] = 65536
    """Rows that hashes address, for every slot of the memory; of xor for every order, too, of polynomial for every hash."""
    base: Annotated[PositiveInt | None, EffectiveWhen(lambda c: c.rules == "polynomial", "rules are polynomial")] = None
    """Base of the polynomial; null: as many as there are token ids."""
    boundary_id: Annotated[NonNegativeInt, EffectiveWhen(lambda c: c.rules == "polynomial", "rules are polynomial")] = (
        MISSING_ID
    )
    """Token id that hides itself and all older ones from the tokens behind it: an end-of-document token."""
    signs: Literal["none", "ids", "hashed"] = "none"
    """Signs by which a row's columns are multiplied, a pattern of +1 and -1 that a second hash chooses: n-grams of one row then
    differ. ids: (xor_j c_j) mod num_sign_patterns; hashed: (xor_j c_j m_j) mod num_sign_patterns, with multipliers of their own;
    none: no signs. What a sequence's start cuts has pattern 0."""
    num_sign_patterns: Annotated[PositiveInt, EffectiveWhen(lambda c: c.signs != "none", "signs are ids or hashed")] = (
        8192
    )
    """Patterns of signs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        highest = _HIGHEST_ORDER[self.rules]
        if self.max_order > highest:
            raise ValueError(
                f"model.memory.address.max_order is {self.max_order}, but rules {self.rules} have multipliers of up to {highest} tokens: set "
                f"max_order: {highest}, or use rules: polynomial"
            )
        if self.signs == "hashed" and self.max_order not in _SIGNS:
            raise ValueError(
                f"model.memory.address.max_order is {self.max_order}, but signs hashed have multipliers of bigrams and trigrams alone: set "
                "max_order: 3, or use signs: ids"
            )

    @property
    def num_addresses(self) -> int:
        """A = (N - 1) K: addresses of a token."""
        return (self.max_order - 1) * self.heads_per_order

    @property
    def num_integers(self) -> int:
        """Integers that are made of every token: its addresses, and the patterns of signs of each."""
        return self.num_addresses * (1 if self.signs == "none" else 2)

    @property
    def ids_before(self) -> int:
        """Token ids before its own that a token's addresses depend on."""
        return self.max_order - 1

    @property
    def cuts_at_boundary(self) -> bool:
        """True if a token of boundary_id hides all older ones from those behind it."""
        return self.rules == "polynomial"

    def sized(self, vocab_size: int) -> Self:
        """These addresses for so many token ids, where their base is left to them."""
        is_open = self.rules == "polynomial" and self.base is None
        return replace(self, base=vocab_size) if is_open else self

    @property
    def num_hashed_rows(self) -> int:
        """Rows that hashes address."""
        if self.rules == "sum":
            return largest_prime(self.num_rows)
        if self.rules == "xor":
            return self.num_rows * self.num_addresses
        return sum(_moduli(self.num_rows, self.num_addresses))

    @property
    def hashes(self) -> Hashes:
        """Numbers of the hashes, address by address, those of an order together."""
        assert self.rules != "polynomial" or self.base is not None, "the base is left to a vocabulary that is not known"
        return _hashes(self.rules, self.max_order, self.heads_per_order, self.num_rows, self.base or 0)

    @property
    def sign_hashes(self) -> Hashes | None:
        """Numbers of the hashes that choose patterns of signs, address by address; None: rows have no signs."""
        if self.signs == "none":
            return None
        orders = self.hashes.orders
        return Hashes(
            operation="xor",
            orders=orders,
            multipliers=tuple(
                _padded(_SIGNS[order] if self.signs == "hashed" else (1,) * order, self.max_order) for order in orders
            ),
            moduli=(self.num_sign_patterns,) * len(orders),
            offsets=(0,) * len(orders),
            missing=0,
        )


@lru_cache(maxsize=64)
def _hashes(rules: Literal["sum", "xor", "polynomial"], max_order: int, heads: int, num_rows: int, base: int) -> Hashes:
    orders = tuple(order for order in range(2, max_order + 1) for _ in range(heads))
    if rules == "xor":
        last = num_rows - 1
        return Hashes(
            operation=rules,
            orders=orders,
            multipliers=tuple(_padded(_XOR[order], max_order) for order in orders),
            moduli=(last,) * len(orders),
            offsets=tuple(num_rows * place for place in range(len(orders))),
            missing=last,
        )
    if rules == "polynomial":
        moduli = _moduli(num_rows, len(orders))
        return Hashes(
            operation="sum",
            orders=orders,
            multipliers=tuple(
                _padded([pow(base, lag, modulus) for lag in range(order)], max_order)
                for order, modulus in zip(orders, moduli, strict=True)
            ),
            moduli=moduli,
            offsets=(0, *itertools.accumulate(moduli[:-1])),
            missing=None,
        )
    prime = largest_prime(num_rows)
    return Hashes(
        operation=rules,
        orders=orders,
        # Remainders of multipliers leave the same remainder of the sum, and no product with an id overflows.
        multipliers=tuple(
            _padded([factor % prime for factor in _sum_multipliers(order, head)], max_order)
            for order in range(2, max_order + 1)
            for head in range(heads)
        ),
        moduli=(prime,) * len(orders),
        offsets=(0,) * len(orders),
        missing=None,
    )


def _moduli(num_rows: int, num_addresses: int) -> tuple[int, ...]:
    return tuple(num_rows + 2 * place + 1 for place in range(num_addresses))


def _sum_multipliers(order: int, head: int) -> list[int]:
    salt = 1 + 97 * (order - 2) + 7919 * head
    return [_PRIMES[lag] + salt * _STRIDES[lag] for lag in range(order)]


def _padded(multipliers: Sequence[int], length: int) -> tuple[int, ...]:
    return (*multipliers, *(0,) * (length - len(multipliers)))
