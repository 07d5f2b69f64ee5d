"""`shuffled_rows`: its signature. It has no gradient, as numbers of rows have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class ShuffledRows(Protocol):
    """See `kernels.shuffled_rows.naive.shuffled_rows`."""

    def __call__(
        self,
        entries: Tensor,
        num_keys: int,
        round_keys: Sequence[int],
        num_rows: int,
        first_row: int,
        num_bank_rows: int,
        /,
        with_blocks: bool = False,
    ) -> tuple[Tensor, Tensor | None]: ...


class RowOperands(NamedTuple):
    """The arguments of `kernels.shuffled_rows.naive.shuffled_rows`, which says what they are."""

    entries: Tensor
    num_keys: int
    round_keys: Sequence[int]
    num_rows: int
    first_row: int
    num_bank_rows: int
    with_blocks: bool = False


SCHEMA = (
    "(Tensor entries, int num_keys, int[] round_keys, int num_rows, int first_row, int num_bank_rows, bool with_blocks)"
    " -> (Tensor, Tensor)"
)
"""The same for a custom op of PyTorch, which gives blocks of no entry where nobody asked for any."""


def empty_result(*operands: Any) -> tuple[Tensor, Tensor]:
    """Uninitialised results as `SCHEMA` declares them; also the ops' fake for `torch.compile`."""
    o = RowOperands(*operands)
    return o.entries.new_empty(o.entries.shape), o.entries.new_empty(o.entries.shape if o.with_blocks else 0)


def from_custom_op(op: Callable[..., tuple[Tensor, Tensor]]) -> ShuffledRows:
    """The function of a custom op: with None for blocks that nobody asked for."""

    def shuffled_rows(*operands: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        o = RowOperands(*operands, **named)
        rows, blocks = op(*o)
        return rows, blocks if o.with_blocks else None

    return shuffled_rows


def reciprocal(divisor: int) -> int:
    """M = floor(2^63 / n), at most 2^63 - 1: for h in [0, 2^62), floor(2 h M / 2^64) is the quotient of h by n, or one
    less.

    With M = 2^63 / n - e, e in [0, 1], what is rounded down is h / n - e h / 2^63, at most a half below h / n. Products
    of 64-bit numbers are one or two instructions, divisions dozens.
    """
    return min(2**63 // divisor, 2**63 - 1)
