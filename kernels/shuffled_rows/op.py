"""`shuffled_rows`: its signature. It has no gradient, as numbers of rows have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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


def empty_result(
    entries: Tensor,
    num_keys: int,
    round_keys: Sequence[int],
    num_rows: int,
    first_row: int,
    num_bank_rows: int,
    with_blocks: bool,
) -> tuple[Tensor, Tensor]:
    """Rows and blocks, not filled yet; also the ops' fake for `torch.compile`. Blocks that nobody asked for are none."""
    return entries.new_empty(entries.shape), entries.new_empty(entries.shape if with_blocks else 0)


def reciprocal(divisor: int) -> int:
    """M = floor(2^63 / n), at most 2^63 - 1: for h in [0, 2^62), floor(2 h M / 2^64) is the quotient of h by n, or one
    less.

    With M = 2^63 / n - e, e in [0, 1], what is rounded down is h / n - e h / 2^63, at most a half below h / n. Products
    of 64-bit numbers are one or two instructions, divisions dozens.
    """
    return min(2**63 // divisor, 2**63 - 1)
