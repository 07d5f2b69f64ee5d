"""`shuffled_rows`: its signature, and the function in PyTorch and in C++. Numbers of rows have no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.common import cpp
from kernels.common.ops import custom_op
from kernels.common.slices import token_slices
from kernels.common.tables import row_dtype
from kernels.shuffled_rows import naive


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
"""Schema of a custom op of PyTorch for `ShuffledRows`, which gives blocks of no entry where nobody asked for any."""


def empty_result(*operands: Any) -> tuple[Tensor, Tensor]:
    """Uninitialised results as `SCHEMA` declares them; also the ops' fake for `torch.compile`."""
    o = RowOperands(*operands)
    dtype = row_dtype(max(o.num_bank_rows, -(-(o.num_keys**2) // o.num_rows)))
    rows = torch.empty_like(o.entries, dtype=dtype, memory_format=torch.contiguous_format)
    return rows, torch.empty_like(rows) if o.with_blocks else rows.new_empty(0)


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


def torch_shuffled_rows(
    entries: Tensor,
    num_keys: int,
    round_keys: Sequence[int],
    num_rows: int,
    first_row: int,
    num_bank_rows: int,
    with_blocks: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The function of `kernels.shuffled_rows.naive.shuffled_rows`, in slices of entries."""
    where = (num_keys, round_keys, num_rows, first_row, num_bank_rows, with_blocks)
    flat = entries.flatten()
    rows, blocks = empty_result(flat, *where)
    # Half a dozen temporaries of 8 bytes per entry.
    for part in token_slices(len(flat), 16):
        rows[part], of_part = naive.shuffled_rows(flat[part], *where)
        if of_part is not None:
            blocks[part] = of_part
    return rows.view(entries.shape), blocks.view(entries.shape) if with_blocks else None


@custom_op("cpu_shuffled_rows", empty_result, schema=SCHEMA)
def _in_cpp(*operands: Any) -> tuple[Tensor, Tensor]:
    o = RowOperands(*operands)
    entries = o.entries.contiguous()
    rows, blocks = empty_result(*o)
    sizes = (o.num_keys, reciprocal(o.num_keys), o.num_rows, reciprocal(o.num_rows), o.first_row, o.num_bank_rows)
    cpp.call(
        *("shuffled_rows", "shuffled_rows", int(rows.dtype == torch.int64), entries, rows),
        *(blocks if o.with_blocks else None, entries.numel()),
        *(*sizes, *o.round_keys),
    )
    return rows, blocks


cpu_shuffled_rows = from_custom_op(_in_cpp)
"""`shuffled_rows` in C++, as a custom op: `torch.compile` takes it as it is."""
